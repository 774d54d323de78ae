"""Layouts of paged row caches: where the row of a slot lies in its array.

A slot is ``page * page_size + row``. Layouts are static: they are part of a compiled program, the array is its input.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

DATA_BYTES = 576
SCALE_BYTES = 8
RECORD_BYTES = DATA_BYTES + SCALE_BYTES
NOPE_DIM = 448
ROPE_DIM = 64
# The unit that arrays are stored in. A row's data is 144 of them and its scales 2: what kernels load, without a
# width-changing bitcast of the whole cache.
WORD_BYTES = 4


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Pages of 584-byte FP8 records: 448 E4M3 codes, 64 bfloat16 rotary channels, 7 E8M0 scales and a zero byte.

    Within a page of n rows the data comes first and the scales last: data of row t at ``576 t``, its scales at
    ``576 n + 8 t`` (serving contracts, section 1). ``page_stride`` bytes lie between pages and ``base_offset`` bytes
    before the first record of each, so several layers may share physical pages; what lies behind the payload is never
    read or written. The array is int32 ``[num_pages, page_stride / 4]``: page and offset stay separate numbers, so no
    index outgrows 32 bits.

    Raises ``ValueError`` naming the field if the numbers do not fit together.
    """

    page_size: int
    page_stride: int
    num_pages: int
    base_offset: int = 0
    record_bytes: int = RECORD_BYTES

    def __post_init__(self) -> None:
        if self.page_size <= 0:
            raise ValueError(f"page_size must be positive, got {self.page_size}")
        if self.num_pages <= 0:
            raise ValueError(f"num_pages must be positive, got {self.num_pages}")
        if self.record_bytes != RECORD_BYTES:
            raise ValueError(f"record_bytes must be {RECORD_BYTES}, got {self.record_bytes}")
        if self.page_stride < self.payload_bytes:
            raise ValueError(
                f"page stride {self.page_stride} is smaller than its {self.payload_bytes}-byte payload "
                f"(page_size {self.page_size})"
            )
        for name, value in (("page_stride", self.page_stride), ("base_offset", self.base_offset)):
            if value < 0 or value % 16:
                raise ValueError(f"{name} must be a non-negative multiple of 16, got {value}")
        if self.base_offset + self.payload_bytes > self.page_stride:
            raise ValueError(
                f"base_offset {self.base_offset} and the {self.payload_bytes}-byte payload exceed the page stride "
                f"{self.page_stride}"
            )

    @classmethod
    def padded(cls, page_size: int, num_pages: int) -> PageLayout:
        """The layout of a cache of its own: strides rounded up to a multiple of 576 bytes."""
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        return cls(page_size, -(-page_size * RECORD_BYTES // DATA_BYTES) * DATA_BYTES, num_pages)

    @property
    def payload_bytes(self) -> int:
        return self.page_size * self.record_bytes

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def width(self) -> int:
        """Channels of an unpacked row."""
        return NOPE_DIM + ROPE_DIM

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_pages, self.page_stride // WORD_BYTES

    @property
    def dtype(self) -> Any:
        return jnp.dtype(jnp.int32)

    def zeros(self) -> jax.Array:
        return jnp.zeros(self.shape, jnp.int32)


@dataclasses.dataclass(frozen=True)
class DenseLayout:
    """Pages of unpacked rows: an array ``[num_pages * page_size, width]`` of ``dtype``."""

    page_size: int
    num_pages: int
    width: int
    dtype: Any

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "width"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_slots, self.width

    def zeros(self) -> jax.Array:
        return jnp.zeros(self.shape, self.dtype)


Layout = PageLayout | DenseLayout


def check_cache(op: str, name: str, cache: Any, layout: Layout) -> None:
    """Raises ``ValueError`` or ``TypeError`` unless ``cache`` is the array that ``layout`` describes."""
    if tuple(cache.shape) != layout.shape:
        raise ValueError(f"{op}: {name} must have shape {list(layout.shape)} of its layout, got {list(cache.shape)}")
    if cache.dtype != layout.dtype:
        raise TypeError(f"{op}: {name} must be {layout.dtype}, got {cache.dtype}")
