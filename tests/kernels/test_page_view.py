"""Paged caches of others: which layouts are accepted, and that accepting one copies nothing."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import kv_pages
from pallas_kernels.foreign_pages import PageView, PageViewError, import_pages, page_view
from pallas_kernels.pages import PageLayout

PAYLOAD = 37_376
BLOCK = 1_039_680


def zeros(num_bytes, offset=0):
    """Zeroed memory that begins ``offset`` bytes after a multiple of 64."""
    raw = np.zeros(num_bytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + num_bytes]


def strided(buffer, shape, strides):
    return np.lib.stride_tricks.as_strided(buffer, shape, strides)


def view_of(array, page_size=64, **options):
    return page_view(array.shape, array.strides, array.itemsize, page_size, **options)


@pytest.mark.contract("PV-1")
def test_contiguous_records():
    assert view_of(np.empty((3, 64, 584), np.uint8)) == PageView(3, PAYLOAD, PAYLOAD)


@pytest.mark.contract("PV-2")
def test_padding_between_pages_is_hidden():
    pages = strided(np.empty(3 * 37_440, np.uint8), (3, 64, 584), (37_440, 584, 1))
    view = view_of(pages)
    assert view == PageView(3, PAYLOAD, 37_440)
    assert view.shape == (3, PAYLOAD)


@pytest.mark.contract("PV-3")
def test_rows_wider_than_their_payload():
    assert view_of(np.empty((5, 37_440), np.uint8)) == PageView(5, PAYLOAD, 37_440)


@pytest.mark.contract("PV-4")
def test_pages_within_packed_blocks():
    """The traced deployment: 7,792 blocks, of which one layer's pages span 8,100,184,320 bytes."""
    view = page_view((7792, PAYLOAD), (BLOCK, 1), 1, 64)
    assert view == PageView(7792, PAYLOAD, BLOCK)
    assert (view.num_pages - 1) * view.page_stride + 37_440 == 8_100_184_320
    assert view_of(np.empty((2, BLOCK), np.uint8)[:, 74_880 : 74_880 + 37_440]) == PageView(2, PAYLOAD, BLOCK)


@pytest.mark.contract("PV-5")
def test_fp8_storage_is_bytes():
    pages = zeros(2 * PAYLOAD).view(ml_dtypes.float8_e4m3fn).reshape(2, 64, 584)
    assert view_of(pages) == PageView(2, PAYLOAD, PAYLOAD)
    words, layout = import_pages(pages, 64)
    assert (words.dtype, layout) == (jnp.int32, PageLayout(64, PAYLOAD, 2))
    assert words.unsafe_buffer_pointer() == pages.__array_interface__["data"][0]


@pytest.mark.contract("PV-6")
def test_other_records_can_be_described_but_not_imported():
    pages = np.empty((3, 64, 432), np.uint8)
    assert view_of(pages, record_bytes=432) == PageView(3, 27_648, 27_648)
    with pytest.raises(PageViewError, match="page width 27648 is smaller than its 37376-byte payload"):
        import_pages(pages, 64)


@pytest.mark.contract("PV-7")
@pytest.mark.parametrize("page_size", [0, -64])
def test_page_size_must_be_positive(page_size):
    with pytest.raises(ValueError, match=f"page_size must be positive, got {page_size}"):
        page_view((3, 64, 584), (PAYLOAD, 584, 1), 1, page_size)


@pytest.mark.contract("PV-8")
@pytest.mark.parametrize("shape", [(), (PAYLOAD,)])
def test_a_page_axis_is_needed(shape):
    with pytest.raises(PageViewError, match=r"expected a paged cache tensor .*got shape \["):
        page_view(shape, (1,) * len(shape), 1, 64)


@pytest.mark.contract("PV-9")
def test_pages_that_overlap():
    with pytest.raises(PageViewError, match="page stride 37375 is smaller than its 37376-byte payload"):
        page_view((3, 64, 584), (37_375, 584, 1), 1, 64)


@pytest.mark.contract("PV-10")
@pytest.mark.parametrize("stride", [37_375, 0, -37_440])
def test_pages_that_overlap_as_a_matrix(stride):
    with pytest.raises(PageViewError, match=f"page stride {stride} is smaller than its 37376-byte payload"):
        page_view((3, 37_440), (stride, 1), 1, 64)


@pytest.mark.contract("PV-11")
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 64, 584), (37_440, 585, 1)),
        ((3, 37_376), (74_752, 2)),
        ((3, 64, 584), (37_440, 1, 64)),
        ((3, 32, 2, 584), (37_440, 1170, 584, 1)),
        ((3, 64, 584), (37_440, -584, 1)),
    ],
)
def test_bytes_of_others_inside_a_page(shape, strides):
    with pytest.raises(PageViewError, match=rf"page payload must be contiguous .*strides \[{strides[0]}, "):
        page_view(shape, strides, 1, 64)


@pytest.mark.contract("PV-12")
@pytest.mark.parametrize("strides", [(36_792, 584, 1), (37_440, 584, 1)])
def test_pages_narrower_than_their_payload(strides):
    with pytest.raises(PageViewError, match="page width 36792 is smaller than its 37376-byte payload"):
        page_view((3, 63, 584), strides, 1, 64)


def test_degenerate_axes():
    assert page_view((1, 37_376), (0, 1), 1, 64) == PageView(1, PAYLOAD, PAYLOAD), "one page has no stride"
    assert page_view((3, 1, 37_376), (37_440, 7, 1), 1, 64).page_stride == 37_440, "nor has an axis of one"
    assert page_view((3, 9_360), (37_440, 4), 4, 64) == PageView(3, PAYLOAD, 37_440), "words are bytes too"
    with pytest.raises(PageViewError, match="at least one page"):
        page_view((0, 37_376), (37_376, 1), 1, 64)
    assert page_view((2**40, 37_376), (2**62, 1), 1, 64).page_stride == 2**62


def packed_rows(rng, count):
    latents = jnp.asarray((0.05 * rng.standard_normal((count, 512))).astype(ml_dtypes.bfloat16))
    data, scales = kv_pages.pack(latents)
    return latents, np.asarray(data), np.asarray(scales)


def fill(pages, data, scales, page_size):
    """Packs rows into ``pages`` (bytes ``[n, >= payload]``) by the format's description."""
    for t in range(len(data)):
        page, row = divmod(t, page_size)
        pages[page, 576 * row : 576 * row + 576] = data[t]
        pages[page, 576 * page_size + 8 * row : 576 * page_size + 8 * row + 8] = scales[t]


@pytest.mark.parametrize(("stride", "offset"), [(PAYLOAD, 0), (37_440, 0), (BLOCK, 46_080)])
def test_rows_are_read_in_place(rng, stride, offset):
    latents, data, scales = packed_rows(rng, 100)
    blocks = zeros(2 * stride).reshape(2, stride)
    blocks[:] = 0xFF
    view = blocks[:, offset : offset + PAYLOAD]
    words, layout = import_pages(view, 64)
    assert (layout.page_stride, layout.num_pages) == (stride, 2)
    assert words.unsafe_buffer_pointer() + layout.base_offset == view.__array_interface__["data"][0]
    fill(view, data, scales, 64)  # after the import: it is the same memory
    got = np.asarray(kv_pages.gather(words, layout, jnp.arange(100)))
    own = PageLayout.padded(64, 2)
    want = kv_pages.gather(
        kv_pages.write(own.zeros(), own, jnp.arange(100), latents, quantize=True), own, jnp.arange(100)
    )
    np.testing.assert_array_equal(got, np.asarray(want))


class ForeignTensor:
    """What speaks DLPack and is no NumPy array."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def test_dlpack():
    pages = zeros(3 * 37_440).reshape(3, 37_440)
    words, layout = import_pages(ForeignTensor(pages), 64)
    assert layout == PageLayout.padded(64, 3)
    assert words.unsafe_buffer_pointer() == pages.__array_interface__["data"][0]
    # DLPack does not tell what lies around a view, so the last page's padding is out of reach.
    with pytest.raises(PageViewError, match="64 bytes of padding are missing"):
        import_pages(ForeignTensor(pages[:, :PAYLOAD]), 64)
    words, layout = import_pages(words, 64)
    assert layout == PageLayout.padded(64, 3)
    with pytest.raises(PageViewError, match=r"must be int32 \[pages, words\], got uint8 \[2, 37440\]"):
        import_pages(jnp.zeros((2, 37_440), jnp.uint8), 64)
    with pytest.raises(TypeError, match="speaks DLPack, got list"):
        import_pages([1, 2], 64)
    with pytest.raises(TypeError, match="integer or FP8 storage, got float32"):
        import_pages(np.zeros((2, 9_360), np.float32), 64)


def test_the_memory_lives_as_long_as_the_array():
    pages = zeros(2 * 37_440).reshape(2, 37_440)
    words, _ = import_pages(pages, 64)
    pages[1, 4] = 7
    del pages
    gc.collect()
    assert int(words[1, 1]) == 7


def test_donation_does_not_write_into_foreign_memory():
    pages = zeros(2 * 37_440).reshape(2, 37_440)
    words, layout = import_pages(pages, 64)

    def write(cache):
        return kv_pages.write(cache, layout, jnp.arange(3), jnp.ones((3, 512)), quantize=True)

    assert np.asarray(jax.jit(write, donate_argnums=0)(words)).any()
    assert not pages.any()


@pytest.mark.parametrize("offset", [1, 16, 32])
def test_memory_that_is_not_aligned_is_refused(offset):
    memory = memoryview(zeros(2 * 37_440, offset))  # nothing is known of what lies around it
    with pytest.raises(PageViewError, match="expected a multiple of 64"):
        import_pages(np.frombuffer(memory, np.uint8).reshape(2, -1), 64)


def test_strides_that_no_kernel_takes_are_refused():
    with pytest.raises(ValueError, match=r"page_stride must be .*multiple of 16, got 37380"):
        import_pages(zeros(2 * 37_380).reshape(2, -1), 64)


def test_read_only_memory_is_refused():
    pages = zeros(2 * 37_440).reshape(2, 37_440)
    pages.flags.writeable = False
    with pytest.raises(PageViewError, match="read-only"):
        import_pages(pages, 64)


@settings(max_examples=150, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 3, 64]),
    pages=st.integers(1, 4),
    stride=st.integers(1, 80_000),
    start=st.integers(0, 4096),
    three_axes=st.booleans(),
)
def test_an_import_is_the_same_memory_or_an_error(page_size, pages, stride, start, three_axes):
    buffer = zeros(400_000)
    shape = (pages, page_size, 584) if three_axes else (pages, page_size * 584)
    inner = (584, 1) if three_axes else (1,)
    end = start + (pages - 1) * stride + page_size * 584
    if end > len(buffer):
        return
    view = np.ndarray(shape, np.uint8, buffer=buffer, offset=start, strides=(stride, *inner))
    try:
        words, layout = import_pages(view, page_size)
    except (ValueError, PageViewError):
        return
    address = view.__array_interface__["data"][0]
    assert words.unsafe_buffer_pointer() + layout.base_offset == address
    assert layout.num_pages == pages
    view[-1].reshape(-1)[4:8] = 1
    got = np.asarray(words).view(np.uint8)[-1, layout.base_offset :]
    np.testing.assert_array_equal(got[: layout.payload_bytes], view[-1].reshape(-1))
