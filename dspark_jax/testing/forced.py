"""A drafter whose quality is set by the test, so that losslessness tests do not depend on draft quality."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from dspark_jax.engine.engine import LLMEngine
from dspark_jax.engine.scheduler import Sequence


class ForcedDrafter:
    """Proposes the true next token with probability ``p``, otherwise a random id.

    ``truth`` maps a request id to the tokens its greedy output should have (from ``Oracle``); beyond its end random ids
    are proposed. Acts on an engine without ``async_scheduling`` (a draft must know the request's exact position).
    Greedy requests only see the ids; for sampled ones build the engine with ``draft_sampling="greedy"``, where a
    draft's law is a point mass, so that the verification stays exact for any proposal.
    """

    def __init__(self, engine: LLMEngine, truth: Mapping[str, SequenceOf[int]], p: float, *, seed: int = 0):
        if engine.config.async_scheduling:
            raise ValueError("a forced drafter needs an engine built with async_scheduling=False")
        if not 0 <= p <= 1:
            raise ValueError(f"p must be in [0, 1], got {p}")
        self._truth, self._p = truth, p
        self._rng = np.random.default_rng(seed)
        self._vocab_size = engine.vocab_size
        engine.runner.draft_override = self

    def __call__(self, sequences: SequenceOf[Sequence], drafts: np.ndarray) -> np.ndarray:
        """Drafts ``[S, K]`` with the rows of ``sequences`` replaced."""
        for sequence in sequences:
            true = list(self._truth.get(sequence.request.request_id, ()))[sequence.num_output :]
            for k in range(drafts.shape[1]):
                right = k < len(true) and self._rng.random() < self._p
                drafts[sequence.slot, k] = true[k] if right else self._rng.integers(self._vocab_size)
        return drafts
