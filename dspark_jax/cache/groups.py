"""Cache groups of one model: layouts and arrays.

Every cache is addressed by absolute position, so rejecting drafts is setting a length (model specification, section
4.3):

* **window** (every trunk layer, every draft stage): one row per token in pages of 64 tokens; only the last
``sliding_window``
  positions and what one step writes stay allocated.
* **entries** (ratio 4 and 128), **index entries** (ratio 4): one row per 4 or 128 tokens. A logical block is 256
tokens,
  that is 64 rows of ratio 4 and 2 of ratio 128, so one block table serves all of them.
* **state** (compressors): per request slot, the projected key and score of the last positions in float32, a ring by
  absolute position. Capacity ``2r + K`` for ratio 4 and ``r + K`` for ratio 128 keeps what K rejected rows overwrite.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from dspark_jax.config import ModelConfig, Precision
from pallas_kernels.pages import DenseLayout, PageLayout

PACKED_HEAD_DIM = 512

Layout = PageLayout | DenseLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Arrays of one trunk layer (or one draft stage, which has a window only)."""

    window: jax.Array
    entries: jax.Array | None = None
    state: jax.Array | None = None
    index_entries: jax.Array | None = None
    index_state: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class CacheLayouts:
    """Static layouts of every group and the sizes that the compiled steps depend on."""

    window: Layout
    entries4: Layout
    entries128: Layout
    index: DenseLayout
    max_num_seqs: int
    max_rollback: int
    packed: bool

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        *,
        precision: Precision,
        dtype: Any,
        num_blocks: int,
        num_window_pages: int,
        max_num_seqs: int,
        max_rollback: int,
    ) -> CacheLayouts:
        """Layouts for one model. ``max_rollback`` is K, the most rows that one step can reject.

        ``checkpoint`` precision with head_dim 512 packs rows in 584 bytes; everything else keeps dense rows of
        ``dtype`` in the same pages (already rounded to the FP8 grid in ``checkpoint`` precision).
        """
        packed = precision == "checkpoint" and config.head_dim == PACKED_HEAD_DIM and config.qk_rope_head_dim == 64

        def rows(page_size: int, num_pages: int) -> Layout:
            if packed:
                return PageLayout.padded(page_size, num_pages)
            return DenseLayout(page_size, num_pages, config.head_dim, jnp.dtype(dtype))

        return cls(
            window=rows(WINDOW_PAGE_TOKENS, num_window_pages),
            entries4=rows(BLOCK_TOKENS // 4, num_blocks),
            entries128=rows(BLOCK_TOKENS // 128, num_blocks),
            index=DenseLayout(BLOCK_TOKENS // 4, num_blocks, config.index_head_dim, jnp.dtype(dtype)),
            max_num_seqs=max_num_seqs,
            max_rollback=max_rollback,
            packed=packed,
        )

    def entries(self, ratio: int) -> Layout:
        return self.entries4 if ratio == 4 else self.entries128

    def block_rows(self, page_size: int, num_pages: int) -> Layout:
        """A layout of the window's row format for rows that live within one step (a draft block's own keys)."""
        if self.packed:
            return PageLayout.padded(page_size, num_pages)
        window = self.window
        assert isinstance(window, DenseLayout)
        return DenseLayout(page_size, num_pages, window.width, window.dtype)

    def _state(self, ratio: int, width: int) -> jax.Array:
        halves = 2 if ratio == 4 else 1
        capacity = halves * ratio + self.max_rollback
        return jnp.zeros((self.max_num_seqs, capacity, 2, halves * width), jnp.float32)

    def layer(self, config: ModelConfig, ratio: int) -> LayerCache:
        """Zeroed arrays of one trunk layer."""
        if ratio == 0:
            return LayerCache(self.window.zeros())
        index = ratio == 4
        return LayerCache(
            window=self.window.zeros(),
            entries=self.entries(ratio).zeros(),
            state=self._state(ratio, config.head_dim),
            index_entries=self.index.zeros() if index else None,
            index_state=self._state(4, config.index_head_dim) if index else None,
        )

    def trunk(self, config: ModelConfig) -> list[LayerCache]:
        return [self.layer(config, ratio) for ratio in config.compress_ratios]

    def draft(self, config: ModelConfig) -> list[LayerCache]:
        """One window per draft stage, in the trunk's window pages (same page numbers, own arrays)."""
        return [self.layer(config, 0) for _ in range(config.num_draft_stages)]
