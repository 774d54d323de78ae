"""Taking back rejected rows leaves no trace: states and logits equal those of a run that never had them."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.testing import Session

K = 5


@pytest.fixture(scope="module")
def session(models):
    return Session(models("dspark", "exact", "float32"), 512, max_rollback=K)


@pytest.mark.contract("T11")
@pytest.mark.parametrize("position", [1, 3, 4, 7, 30, 31, 32, 63, 64, 125, 127, 128, 130, 255, 256])
def test_rejected_rows_leave_no_trace(session, position):
    """Every accepted count 0..K at positions around 4, 128, page and window ends, several rounds in a row, bit for
    bit."""
    rng = np.random.default_rng(position)
    tokens = rng.integers(8, 320, 330)
    # The same steps without rejections: row results do not depend on how rows are grouped, so this is the truth.
    session.reset()
    truth = session.extend(tokens).logits
    for accepted in range(K + 1):
        session.reset()
        session.extend(tokens[:position])
        at = position
        for _ in range(3):
            drafts = rng.integers(8, 320, K)
            drafts[:accepted] = tokens[at + 1 : at + 1 + accepted]
            chunk = session.extend([tokens[at], *drafts])
            np.testing.assert_array_equal(chunk.logits[: accepted + 1], truth[at : at + accepted + 1])
            at += accepted + 1
            session.rollback(at)
        np.testing.assert_array_equal(session.extend(tokens[at : at + 8]).logits, truth[at : at + 8])
