"""Cache groups of one model: layouts and arrays.

Every cache is addressed by absolute position, so rejecting drafts is setting a length (model specification, section
4.3):

* **window** (every trunk layer, every draft stage): one row per token in pages of 64 tokens; only the last
  ``sliding_window`` positions and what one step writes stay allocated.
* **entries** (ratio 4 and 128), **index entries** (ratio 4): one row per 4 or 128 tokens. A logical block is 256
  tokens, that is 64 rows of ratio 4 and 2 of ratio 128, so one block table serves all of them.
* **state** (compressors): per request slot, the projected key and score of the last positions in float32, a ring by
  absolute position. Capacity ``2r + K`` for ratio 4 and ``r + K`` for ratio 128 keeps what K rejected rows overwrite.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from dspark_jax.config import ConfigError, ModelConfig, PageStyle, Precision
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
class LayerLayouts:
    """Where one layer's rows lie in its arrays. Static: part of the compiled program."""

    window: Layout
    entries: Layout | None = None
    index: DenseLayout | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """Caches of consecutive layers: arrays of their own, or (page style ``packed_blocks``) two slabs for all.

    In a slab every layer's page of one physical block lies side by side, at the ``base_offset`` of its layout; then
    ``layers`` hold what is not paged in 584-byte rows, and their windows and entries come from the slabs. A step
    updates layer after layer, each in place.
    """

    layers: list[dict[str, jax.Array]]
    window_slab: jax.Array | None = None
    entries_slab: jax.Array | None = None

    def layer(self, index: int) -> LayerCache:
        own = dict(self.layers[index])
        if self.window_slab is not None:
            own["window"] = self.window_slab
            if "state" in own:
                assert self.entries_slab is not None
                own["entries"] = self.entries_slab
        return LayerCache(**own)

    def with_layer(self, index: int, cache: LayerCache) -> Self:
        """The caches after a step of one layer."""
        arrays = {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache)}
        layers = list(self.layers)
        layers[index] = {name: arrays[name] for name in self.layers[index]}
        if self.window_slab is None:
            return dataclasses.replace(self, layers=layers)
        entries = self.entries_slab if cache.entries is None else cache.entries
        return dataclasses.replace(self, layers=layers, window_slab=cache.window, entries_slab=entries)


@dataclasses.dataclass(frozen=True)
class CacheLayouts:
    """Static layouts of every layer and the sizes that the compiled steps depend on.

    ``trunk`` has one entry per layer and ``draft`` one per draft stage (a window only; the same page numbers as the
    trunk's windows). ``packed_rows``: rows are 584-byte records, else dense vectors of one dtype.
    """

    trunk: tuple[LayerLayouts, ...]
    draft: tuple[LayerLayouts, ...]
    max_num_seqs: int
    max_rollback: int
    packed_rows: bool
    page_style: PageStyle

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
        page_style: PageStyle = "padded",
    ) -> CacheLayouts:
        """Layouts for one model. ``max_rollback`` is K, the most rows that one step can reject.

        ``checkpoint`` precision with head_dim 512 packs rows in 584 bytes; everything else keeps dense rows of
        ``dtype`` in the same pages (already rounded to the FP8 grid in ``checkpoint`` precision). ``page_style`` says
        how far apart packed pages lie: ``contiguous`` (their payload), ``padded`` (rounded up to 576 bytes) or
        ``packed_blocks`` (every layer's page of a block side by side). Source: serving contracts, section 1.2.

        Raises ``ConfigError`` for a page style other than ``padded`` where rows are dense.
        """
        packed = precision == "checkpoint" and config.head_dim == PACKED_HEAD_DIM and config.qk_rope_head_dim == 64
        if not packed and page_style != "padded":
            raise ConfigError(
                f"page_style {page_style!r} needs rows of 584 bytes: expected precision 'checkpoint' and head_dim "
                f"{PACKED_HEAD_DIM}, got {precision!r} and {config.head_dim}"
            )

        def rows(page_size: int, num_pages: int) -> Layout:
            if not packed:
                return DenseLayout(page_size, num_pages, config.head_dim, jnp.dtype(dtype))
            own = PageLayout.padded(page_size, num_pages)
            return dataclasses.replace(own, page_stride=own.payload_bytes) if page_style == "contiguous" else own

        index = DenseLayout(BLOCK_TOKENS // 4, num_blocks, config.index_head_dim, jnp.dtype(dtype))
        entries = {ratio: rows(BLOCK_TOKENS // ratio, num_blocks) for ratio in (4, 128)}
        window = rows(WINDOW_PAGE_TOKENS, num_window_pages)
        trunk = [
            LayerLayouts(window, entries.get(ratio), index if ratio == 4 else None) for ratio in config.compress_ratios
        ]
        draft = [LayerLayouts(window)] * config.num_draft_stages
        if page_style == "packed_blocks":
            trunk, draft = _side_by_side(trunk), _side_by_side(draft)
        return cls(tuple(trunk), tuple(draft), max_num_seqs, max_rollback, packed, page_style)

    def block_rows(self, page_size: int, num_pages: int) -> Layout:
        """A layout of the window's row format for rows that live within one step (a draft block's own keys)."""
        window = self.trunk[0].window
        if isinstance(window, PageLayout):
            return PageLayout.padded(page_size, num_pages)
        return DenseLayout(page_size, num_pages, window.width, window.dtype)

    def trunk_caches(self, config: ModelConfig) -> Caches:
        """Zeroed caches of every trunk layer."""
        layers = []
        for ratio, layouts in zip(config.compress_ratios, self.trunk, strict=True):
            arrays = {} if self._slabs else {"window": layouts.window.zeros()}
            if layouts.entries is not None:
                arrays["state"] = self._state(ratio, config.head_dim)
                if not self._slabs:
                    arrays["entries"] = layouts.entries.zeros()
            if layouts.index is not None:
                arrays["index_entries"] = layouts.index.zeros()
                arrays["index_state"] = self._state(ratio, config.index_head_dim)
            layers.append(arrays)
        entries = next((x.entries for x in self.trunk if x.entries is not None), None)
        if not self._slabs:
            return Caches(layers)
        return Caches(layers, self.trunk[0].window.zeros(), None if entries is None else entries.zeros())

    def draft_caches(self) -> Caches:
        """Zeroed windows of every draft stage."""
        if self._slabs and self.draft:
            return Caches([{} for _ in self.draft], self.draft[0].window.zeros())
        return Caches([{"window": layouts.window.zeros()} for layouts in self.draft])

    @property
    def _slabs(self) -> bool:
        return self.page_style == "packed_blocks"

    def _state(self, ratio: int, width: int) -> jax.Array:
        halves = 2 if ratio == 4 else 1
        capacity = halves * ratio + self.max_rollback
        return jnp.zeros((self.max_num_seqs, capacity, 2, halves * width), jnp.float32)


def _side_by_side(layers: list[LayerLayouts]) -> list[LayerLayouts]:
    """The layouts of ``layers`` when their pages share blocks: one stride, each layer's own offset."""

    def place(layouts: list[Layout | None]) -> list[Layout | None]:
        placed, offset = [], 0
        for layout in layouts:
            placed.append(offset)
            offset += layout.page_stride if isinstance(layout, PageLayout) else 0
        return [
            dataclasses.replace(layout, page_stride=offset, base_offset=start)
            if isinstance(layout, PageLayout)
            else layout
            for layout, start in zip(layouts, placed, strict=True)
        ]

    windows, entries = place([x.window for x in layers]), place([x.entries for x in layers])
    return [
        dataclasses.replace(x, window=window, entries=entry)
        for x, window, entry in zip(layers, windows, entries, strict=True)
    ]
