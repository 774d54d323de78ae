"""Exact precision in float32 against float references, end to end."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.testing.session import Session


@pytest.fixture(scope="module")
def data(golden_data):
    return golden_data("dspark_exact")


@pytest.fixture(scope="module")
def backbone(golden_data):
    return golden_data("tiny_v4")


@pytest.fixture(scope="module")
def session(golden_model):
    return Session(golden_model("dspark_exact", "exact", "float32"), 512)


@pytest.fixture(scope="module")
def one_pass(session, backbone):
    session.reset()
    return session.extend(backbone["tokens"])


def test_backbone_logits(one_pass, backbone, data):
    positions = backbone["logits_positions"]
    np.testing.assert_allclose(one_pass.logits[positions], backbone["logits"], atol=1e-4)
    np.testing.assert_allclose(one_pass.logits[-1], backbone["last_logits"], atol=1e-4)
    np.testing.assert_array_equal(one_pass.logits.argmax(-1), data["argmax"])


def test_backbone_greedy_tokens(session, backbone):
    """80 greedy tokens after a prompt of 200, one call each, equal transformers' ``generate``."""
    greedy = backbone["greedy"].tolist()
    session.reset()
    token = int(session.extend(greedy[:200]).logits[-1].argmax())
    out = []
    for _ in range(80):
        out.append(token)
        token = int(session.extend([token]).logits[-1].argmax())
    assert out == greedy[200:]


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_prefill_in_chunks_equals_one_pass(session, backbone, one_pass, chunk):
    session.reset()
    tokens = backbone["tokens"]
    pieces = [session.extend(tokens[i : i + chunk]) for i in range(0, 300, chunk)]
    np.testing.assert_allclose(np.concatenate([p.logits for p in pieces]), one_pass.logits, atol=1e-4)
    np.testing.assert_allclose(np.concatenate([p.taps for p in pieces]), one_pass.taps, atol=1e-4)


@pytest.mark.contract("T9")
def test_drafter(session, data, one_pass):
    for i, p in enumerate(data["p"].tolist()):
        session.reset()
        session.commit(one_pass.taps[: p + 1], 0)
        block = session.draft(int(data["anchor"][i]), p + 1)
        previous = [data["anchor"][i], *data["draft_tokens"][i, :-1]]
        markov, confidence = session.markov(block, previous)
        for got, name, atol in (
            (one_pass.logits[p], "target_logits", 1e-4),
            (one_pass.taps[p], "main_hidden", 1e-4),
            (block.hidden[0], "draft_hidden", 2e-4),
            (block.base_logits[0], "base_logits", 1e-4),
            (markov, "markov_logits", 1e-4),
            (confidence, "confidence", 1e-4),
        ):
            np.testing.assert_allclose(got, data[name][i], atol=atol, err_msg=f"{name} at p = {p}")
        np.testing.assert_array_equal(markov.argmax(-1), data["draft_tokens"][i])


@pytest.mark.contract("T5")
@pytest.mark.parametrize("length", [15, 16, 17, 127, 128, 129, 300])
def test_context_may_be_committed_in_any_pieces(session, data, one_pass, length):
    """Drafts after one commit equal those after any cutting of it, across the window's end and page borders."""
    blocks = []
    for cut in ([length], [length - 1, 1], [length % 7 or 7] + [7] * ((length - 1) // 7), [1] * (length % 64)):
        session.reset()
        at = length - sum(cut)
        if at:
            session.commit(one_pass.taps[:at], 0)
        for size in cut:
            session.commit(one_pass.taps[at : at + size], at)
            at += size
        blocks.append(np.asarray(session.draft(3, length).hidden))
    for other in blocks[1:]:
        np.testing.assert_array_equal(other, blocks[0])


@pytest.mark.contract("T4")
def test_block_rows_see_each_other_and_exactly_one_window_of_context(session, one_pass):
    window, p = session.config.sliding_window, 100

    def hidden(changed=None, anchor=3):
        taps = one_pass.taps[:p].copy()
        if changed is not None:
            taps[changed] += 1.0
        session.reset()
        session.commit(taps, 0)
        return np.asarray(session.draft(anchor, p).hidden)[0]

    base = hidden()
    np.testing.assert_array_equal(hidden(changed=p - window - 1), base)
    assert (np.abs(hidden(changed=p - window) - base).max(-1) > 1e-6).all()
    assert (np.abs(hidden(anchor=4) - base).max(-1) > 1e-6).all()
