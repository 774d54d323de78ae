"""One sequence driven by hand through the model: the instrument for module-level checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from dspark_jax.cache.groups import CacheLayouts, Caches
from dspark_jax.config import PageStyle
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.dspark import DraftBlock, commit_context, draft_block, markov_step
from dspark_jax.models.rows import Rows, window_writes

# Rows are padded to one of the first two or a multiple of the last, so that few programs are compiled.
_ROW_BUCKETS = (8, 64, 256)


def _padded_rows(n: int) -> int:
    *small, large = _ROW_BUCKETS
    return next((size for size in small if n <= size), -(-n // large) * large)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What the trunk computed for the n tokens of one call (NumPy): float32 logits ``[n, V]``, streams ``[n, m, D]``
    and the drafter's taps ``[n, mD]`` (``None`` without a DSpark drafter)."""

    logits: np.ndarray
    streams: np.ndarray
    taps: np.ndarray | None


class Session:
    """Caches of one request and the calls that move it on: ``extend``, ``rollback``, ``commit``, ``draft``.

    Positions are explicit, so any chunking, re-play or rollback can be tried. Rows are padded to
    a few sizes, each of which compiles once. Not for serving: the engine batches requests.
    """

    def __init__(self, model: DeepseekV4, max_length: int, *, max_rollback: int = 8, page_style: PageStyle = "padded"):
        self.config = model.config
        self.max_length = -(-max_length // BLOCK_TOKENS) * BLOCK_TOKENS
        self._graph, self._params = nnx.split(model)
        blocks, pages = self.max_length // BLOCK_TOKENS, self.max_length // WINDOW_PAGE_TOKENS
        self.layouts = CacheLayouts.create(
            model.config,
            precision=model.policy.precision,
            dtype=model.policy.dtype,
            num_blocks=blocks + 1,
            num_window_pages=pages + 1,
            max_num_seqs=1,
            max_rollback=max_rollback,
            page_style=page_style,
        )
        self._window_table = np.arange(1, pages + 1, dtype=np.int32)[None]
        self._block_table = np.arange(1, blocks + 1, dtype=np.int32)[None]
        self._forward = jax.jit(self._forward_fn)
        self._commit = jax.jit(self._commit_fn)
        self._draft = jax.jit(self._draft_fn)
        self._markov = jax.jit(self._markov_fn)
        self.reset()

    def reset(self) -> None:
        """An empty sequence: zeroed caches."""
        self.length = 0
        self.trunk: Caches = self.layouts.trunk_caches(self.config)
        self.drafter: Caches = self.layouts.draft_caches()

    def rollback(self, length: int) -> None:
        """Forgets every position from ``length`` on. Nothing but the length changes: see ``cache.groups``."""
        if not 0 <= length <= self.length:
            raise ValueError(f"expected a length in [0, {self.length}], got {length}")
        self.length = length

    def extend(self, tokens: Sequence[int] | np.ndarray) -> Chunk:
        """Processes tokens at positions ``length ..`` in one call and moves the length on."""
        n = len(tokens)
        if n == 0 or self.length + n > self.max_length:
            raise ValueError(f"expected 1 to {self.max_length - self.length} tokens, got {n}")
        padded = np.zeros(_padded_rows(n), np.int32)
        padded[:n] = tokens
        (logits, streams, taps), self.trunk = self._forward(
            self._params, self.trunk, padded, np.int32(self.length), np.int32(n)
        )
        self.length += n
        return Chunk(np.asarray(logits)[:n], np.asarray(streams)[:n], None if taps is None else np.asarray(taps)[:n])

    def commit(self, taps: np.ndarray, position: int) -> None:
        """Feeds the drafter the taps of committed positions ``position ..`` (DSpark only)."""
        n = len(taps)
        padded = np.zeros((_padded_rows(n), taps.shape[1]), taps.dtype)
        padded[:n] = taps
        self.drafter = self._commit(self._params, self.drafter, padded, np.int32(position), np.int32(n))

    def draft(self, anchor: int, position: int, *, first_valid: int = 0) -> DraftBlock:
        """Backbone output of the drafter for one block with ``anchor`` at ``position`` (arrays ``[1, g, ...]``), blind
        to context rows below ``first_valid``."""
        numbers = (np.array([x], np.int32) for x in (anchor, position, first_valid))
        return self._draft(self._params, self.drafter, *numbers)

    def markov(self, block: DraftBlock, previous: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits ``[g, V]`` and confidence logits ``[g]`` of a block's rows, row i given the token ``previous[i]``."""
        logits, confidence = self._markov(
            self._params, block.hidden[0], block.base_logits[0], np.asarray(previous, np.int32)
        )
        return np.asarray(logits), np.asarray(confidence)

    # -- compiled bodies ----------------------------------------------------------------------------------------------
    def _rows(self, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Rows:
        offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return Rows(
            token=tokens,
            position=jnp.where(offset < count, start + offset, 0),
            request=jnp.zeros_like(tokens),
            valid=offset < count,
            slot=jnp.zeros((1,), jnp.int32),
            start=start[None],
            first_row=jnp.zeros((1,), jnp.int32),
            num_rows=count[None],
            window_table=jnp.asarray(self._window_table),
            block_table=jnp.asarray(self._block_table),
            write_from=jnp.zeros((1,), jnp.int32),
            first_valid=jnp.zeros((1,), jnp.int32),
        )

    def _forward_fn(self, params, trunk, tokens, start, count):
        model = nnx.merge(self._graph, params)
        out, trunk = model(self._rows(tokens, start, count), trunk, self.layouts)
        return (model.logits(out.streams), out.streams, out.taps), trunk

    def _commit_fn(self, params, drafter, taps, start, count):
        rows = self._rows(jnp.zeros(taps.shape[0], jnp.int32), start, count)
        model = nnx.merge(self._graph, params)
        return commit_context(model, drafter, self.layouts, taps, rows.position, window_writes(rows))

    def _draft_fn(self, params, drafter, anchor, position, first_valid):
        model = nnx.merge(self._graph, params)
        table, live = jnp.asarray(self._window_table), jnp.ones((1,), jnp.bool_)
        return draft_block(model, drafter, self.layouts, anchor, position, table, live, first_valid)

    def _markov_fn(self, params, hidden, base_logits, previous):
        return markov_step(nnx.merge(self._graph, params), hidden, base_logits, previous)
