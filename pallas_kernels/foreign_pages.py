"""Paged caches that somebody else holds: what their pages look like, and how to use them without a copy.

Source: serving contracts, section 1.5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.pages import RECORD_BYTES, PageLayout

# XLA's CPU client reads memory of others in place only from such addresses.
_ALIGNMENT = 64
_DLPACK_CPU = 1


class PageViewError(RuntimeError):
    """An array cannot be used in place as a paged cache of this page size."""


@dataclasses.dataclass(frozen=True)
class PageView:
    """A logical matrix of ``num_pages`` rows of ``payload_bytes``; rows begin ``page_stride`` bytes apart."""

    num_pages: int
    payload_bytes: int
    page_stride: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_pages, self.payload_bytes


def page_view(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, page_size: int, *, record_bytes: int = RECORD_BYTES
) -> PageView:
    """What an array of this ``shape``, ``strides`` (bytes) and ``itemsize`` is as pages of ``page_size`` records.

    The first axis counts pages; the others, in order, are the bytes of one page, of which the first ``page_size *
    record_bytes`` are payload and the rest is padding. Nothing is read: any dtype is a number of bytes.

    Raises:
      ValueError: ``page_size`` is not positive.
      PageViewError: no page axis, no page, a page narrower than its payload, pages that overlap (at any rank), or
        bytes of other records inside a page.
    """
    if page_size <= 0:
        raise ValueError(f"page_size must be positive, got {page_size}")
    shape, strides = tuple(map(int, shape)), tuple(map(int, strides))
    described = f"(shape {list(shape)}, strides {list(strides)} bytes)"
    if len(shape) < 2:
        raise PageViewError(f"expected a paged cache tensor [pages, ...], got shape {list(shape)}")
    if 0 in shape:
        raise PageViewError(f"expected a paged cache tensor with at least one page, got shape {list(shape)}")
    payload, width = page_size * record_bytes, math.prod(shape[1:]) * itemsize
    if width < payload:
        raise PageViewError(f"page width {width} is smaller than its {payload}-byte payload {described}")
    # One page has no next one, and NumPy leaves the stride of such an axis undefined.
    stride = strides[0] if shape[0] > 1 else width
    if stride < payload:
        raise PageViewError(f"page stride {stride} is smaller than its {payload}-byte payload {described}")
    expected = itemsize
    for size, step in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size > 1 and step != expected:
            raise PageViewError(f"page payload must be contiguous {described}")
        expected *= size
    return PageView(shape[0], payload, stride)


def import_pages(buffer: Any, page_size: int) -> tuple[jax.Array, PageLayout]:
    """A foreign cache as the array and layout that kernels here take, in the same memory.

    ``buffer`` is a NumPy array, a JAX array or anything that speaks DLPack (a torch tensor), of any integer or FP8
    dtype, shaped ``[pages, ...]`` as ``page_view`` says. A NumPy view of one layer's pages within larger blocks gives
    the layer's ``base_offset``: the memory around it is found through the array that owns it. Returns the int32 array
    ``[num_pages, page_stride / 4]`` and its layout.

    The result keeps the memory alive and sees later writes to it, so whoever writes must not do so while a step reads.
    Steps that donate it get a copy from XLA: a foreign cache is for reading.

    Raises:
      ValueError: ``page_size`` is not positive, or stride or offset are no multiples of 16.
      TypeError: not an array, or a dtype that is neither integer nor FP8.
      PageViewError: the pages are not laid out as ``page_view`` demands, or they cannot be used in place: memory that
        is read-only or not aligned to 64 bytes, a last page whose padding is not part of the memory, another device
        and dtype. Nothing is ever copied instead.
    """
    if isinstance(buffer, jax.Array):
        return _import_words(buffer, buffer, page_size)
    if not isinstance(buffer, np.ndarray):
        if not hasattr(buffer, "__dlpack__") or not hasattr(buffer, "__dlpack_device__"):
            raise TypeError(f"expected an array that speaks DLPack, got {type(buffer).__name__}")
        if buffer.__dlpack_device__()[0] != _DLPACK_CPU:
            try:
                words = jax.dlpack.from_dlpack(buffer, copy=False)
            except Exception as error:  # whatever the producer and XLA raise, the reason is in their message
                raise PageViewError(f"the buffer cannot be used in place: {error}") from error
            return _import_words(buffer, words, page_size)
        try:
            buffer = np.from_dlpack(buffer)
        except (BufferError, RuntimeError, TypeError) as error:
            raise PageViewError(
                f"the buffer cannot be viewed by NumPy ({error}): view it as uint8 or int32 first"
            ) from error
    return _import_numpy(buffer, page_size)


def _check_dtype(dtype: Any) -> None:
    if np.dtype(dtype).kind not in "iu" and not str(dtype).startswith("float8"):
        raise TypeError(f"a paged cache must have integer or FP8 storage, got {dtype}")


def _import_words(buffer: Any, words: jax.Array, page_size: int) -> tuple[jax.Array, PageLayout]:
    """An array on a device: its rows are compact, so its shape says everything."""
    _check_dtype(words.dtype)
    itemsize = words.dtype.itemsize
    strides = [math.prod(words.shape[axis + 1 :]) * itemsize for axis in range(words.ndim)]
    view = page_view(words.shape, strides, itemsize, page_size)
    if words.dtype != np.int32 or words.ndim != 2:
        raise PageViewError(
            f"an array on a device must be int32 [pages, words], got {words.dtype} {list(words.shape)}: view it so "
            "before, a change of width would copy the cache here"
        )
    if not isinstance(buffer, jax.Array) and hasattr(buffer, "data_ptr"):
        _require_same_address(words, buffer.data_ptr())
    return words, PageLayout(page_size, view.page_stride, view.num_pages)


def _import_numpy(array: np.ndarray, page_size: int) -> tuple[jax.Array, PageLayout]:
    _check_dtype(array.dtype)
    view = page_view(array.shape, array.strides, array.itemsize, page_size)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    low, high = np.lib.array_utils.byte_bounds(owner)
    address, total = array.__array_interface__["data"][0], view.num_pages * view.page_stride
    # The array handed to kernels consists of whole strides, from ``address - base_offset`` on: room for the last page's
    # padding must be found behind it or, by beginning earlier, before it.
    earliest, latest = max(0, address + total - high), min(address - low, view.page_stride - view.payload_bytes)
    if earliest > latest:
        raise PageViewError(
            f"{view.num_pages} whole pages of {view.page_stride} bytes do not lie within the buffer of {high - low} "
            f"bytes: {earliest - latest} bytes of padding are missing. Import a view of the array that owns the "
            "memory, or one page less"
        )
    base_offset = earliest + (address - earliest) % _ALIGNMENT
    # Checks that the numbers are multiples of 16 and fit together.
    layout = PageLayout(page_size, view.page_stride, view.num_pages, base_offset if base_offset <= latest else 0)
    if base_offset > latest:
        raise PageViewError(
            f"the pages begin at address {address:#x}: expected a multiple of {_ALIGNMENT}, or that many bytes of the "
            "same buffer around them"
        )
    flat = np.asarray(owner).ravel(order="K")
    if not flat.flags.writeable or not array.flags.writeable:
        raise PageViewError("the buffer is read-only: DLPack does not export such memory")
    start = address - base_offset - low
    words = flat.view(np.uint8)[start : start + total].view(np.int32).reshape(view.num_pages, -1)
    if not flat.flags.c_contiguous or words.__array_interface__["data"][0] != address - base_offset:
        raise PageViewError("the array that owns the memory is not contiguous")
    result = jax.dlpack.from_dlpack(words, copy=False)
    _require_same_address(result, address - base_offset)
    return result, layout


def _require_same_address(array: jax.Array, address: int) -> None:
    got = array.unsafe_buffer_pointer()
    if got != address:
        raise PageViewError(f"JAX copied the buffer: expected address {address:#x}, got {got:#x}")
