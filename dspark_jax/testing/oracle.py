"""The oracle: what greedy decoding must give, computed the slow way, and a drafter that knows it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.cache.groups import BLOCK_TOKENS, WINDOW_PAGE_TOKENS, CacheLayouts
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.rows import Rows


@dataclasses.dataclass(frozen=True)
class OracleResult:
    """Greedy continuation of a prompt. ``gaps[i]`` is the difference of the two largest logits where ``tokens[i]`` was
    chosen: a disagreement at a tiny gap is a rounding matter, anywhere else it is a bug."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class Oracle:
    """One request, no cache reuse, no speculation: the whole sequence is recomputed for every step.

    ``model`` should be in ``exact`` precision with float32 activations (``Policy.create(config, "exact", "float32")``).
    Sequences are padded to one length so that the oracle compiles once.
    """

    def __init__(self, model: DeepseekV4, max_length: int):
        self.max_length = -(-max_length // BLOCK_TOKENS) * BLOCK_TOKENS
        self.config = model.config
        self._graph, self._params = nnx.split(model)
        blocks, pages = self.max_length // BLOCK_TOKENS, self.max_length // WINDOW_PAGE_TOKENS
        self._layouts = CacheLayouts.create(
            model.config,
            precision=model.policy.precision,
            dtype=model.policy.dtype,
            num_blocks=blocks + 1,
            num_window_pages=pages + 1,
            max_num_seqs=1,
            max_rollback=0,
        )
        self._tables = (np.arange(1, pages + 1, dtype=np.int32)[None], np.arange(1, blocks + 1, dtype=np.int32)[None])

    @functools.cached_property
    def _forward(self):
        @jax.jit
        def forward(params, tokens, length):
            model = nnx.merge(self._graph, params)
            n = tokens.shape[0]
            index = jnp.arange(n, dtype=jnp.int32)
            zero = jnp.zeros((1,), jnp.int32)
            rows = Rows(
                token=tokens,
                position=index,
                request=jnp.zeros(n, jnp.int32),
                valid=index < length,
                slot=zero,
                start=zero,
                first_row=zero,
                num_rows=length[None],
                window_table=jnp.asarray(self._tables[0]),
                block_table=jnp.asarray(self._tables[1]),
            )
            out, _ = model(rows, self._layouts.trunk(self.config), self._layouts)
            return model.logits(out.streams)

        return forward

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 logits ``[len(tokens), V]`` at every position, in one pass from an empty cache."""
        if not 0 < len(tokens) <= self.max_length:
            raise ValueError(f"expected 1 to {self.max_length} tokens, got {len(tokens)}")
        padded = np.zeros(self.max_length, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(self._forward(self._params, padded, np.int32(len(tokens))))[: len(tokens)]

    def generate(self, prompt: Sequence[int], num_tokens: int, *, guess: Sequence[int] = ()) -> OracleResult:
        """Greedy continuation by ``num_tokens`` (end tokens are ordinary here).

        ``guess`` is a continuation to check: one pass confirms its longest right prefix, so a right guess costs one
        pass. The result does not depend on it.
        """
        out: list[int] = []
        gaps: list[float] = []
        while len(out) < num_tokens:
            ahead = list(guess[len(out) : num_tokens]) if list(guess[: len(out)]) == out else []
            logits = self.logits([*prompt, *out, *ahead])
            for i in range(len(ahead) + 1):
                if len(out) == num_tokens:
                    break
                row = logits[len(prompt) + len(out) - 1]
                second, first = np.partition(row, -2)[-2:]
                out.append(int(row.argmax()))
                gaps.append(float(first - second))
                if i < len(ahead) and out[-1] != ahead[i]:
                    break
        return OracleResult(tuple(out), tuple(gaps))


def oracle_generate(
    model: DeepseekV4, prompt: Sequence[int], num_tokens: int, *, guess: Sequence[int] = ()
) -> OracleResult:
    """Greedy decoding by recomputing the whole sequence at every step (see ``Oracle``, which compiles once for many
    calls)."""
    return Oracle(model, len(prompt) + num_tokens).generate(prompt, num_tokens, guess=guess)
