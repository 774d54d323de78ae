"""Paged rows in the 584-byte format: bytes, pages, padding and errors."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import kv_pages
from pallas_kernels.pages import DenseLayout, PageLayout


def latents(rng, n, scale=0.05):
    return jnp.asarray((scale * rng.standard_normal((n, 512))).astype(ml_dtypes.bfloat16))


@pytest.mark.contract("KV-1")
@pytest.mark.parametrize(
    ("page_size", "payload", "padded"),
    [(2, 1168, 1728), (16, 9344, 9792), (64, 37376, 37440), (128, 74752, 74880), (256, 149504, 149760)],
)
def test_page_widths(page_size, payload, padded):
    layout = PageLayout.padded(page_size, 3)
    assert (layout.payload_bytes, layout.page_stride) == (payload, padded)
    assert layout.zeros().shape == (3, padded // 4)


@pytest.mark.contract("KV-1", "PV-9")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 0}, "page_size must be positive, got 0"),
        ({"page_stride": 37_360}, "page stride 37360 is smaller than its 37376-byte payload"),
        ({"page_stride": 37_380}, "page_stride must be a non-negative multiple of 16"),
        ({"base_offset": 128}, "base_offset 128 and the 37376-byte payload exceed the page stride 37440"),
        ({"num_pages": 0}, "num_pages must be positive, got 0"),
        ({"record_bytes": 432}, "record_bytes must be 584, got 432"),
    ],
)
def test_page_layout_is_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        PageLayout(**{"page_size": 64, "page_stride": 37_440, "num_pages": 2, **fields})


@pytest.mark.contract("KV-2")
@pytest.mark.parametrize(
    ("amax", "byte"), [(448, 127), (450, 128), (224, 126), (225, 127), (7, 121), (3.5, 120), (0, 105)]
)
def test_scale_bytes(amax, byte):
    """450 stands for the specification's 449, which is no bfloat16 number."""
    row = np.zeros((1, 512), np.float32)
    row[0, 5] = -amax
    _, scales = kv_pages.pack(jnp.asarray(row))
    assert scales[0, 0] == byte
    assert scales[0, 7] == 0
    unfloored = kv_pages.pack(jnp.zeros((1, 512)), amax_floor=0.0)[1]
    assert unfloored[0].tolist() == [127] * 7 + [0]


@pytest.mark.contract("KV-3")
@pytest.mark.parametrize("page_size", [2, 64, 256])
def test_rows_survive_within_half_a_code(rng, page_size):
    x = latents(rng, 2 * page_size + 1)
    layout = PageLayout.padded(page_size, 4)
    cache = kv_pages.write(layout.zeros(), layout, jnp.arange(len(x)), x, quantize=True)
    slots = np.array([0, page_size - 1, page_size, page_size + 1, 2 * page_size])
    got = np.asarray(kv_pages.gather(cache, layout, jnp.asarray(slots)), np.float32)
    want = np.asarray(x, np.float32)[slots]
    np.testing.assert_array_equal(got[:, 448:], want[:, 448:])
    exponent = np.asarray(kv_pages.pack(x)[1], np.int32)[slots, :7] - 127
    bound = np.repeat(16 * 2.0**exponent, 64, axis=1)  # half the step of E4M3's largest binade
    assert (np.abs(got - want)[:, :448] <= bound).all()
    assert (np.abs(got - want)[:, :448] > 0).any()


@pytest.mark.contract("KV-3")
def test_byte_layout_of_a_page(rng):
    """Data of row t at 576 t (448 codes, then 64 bfloat16), scales of row t at 576 P + 8 t, a zero as their last."""
    x, layout = latents(rng, 1), PageLayout.padded(64, 2)
    cache = kv_pages.write(layout.zeros(), layout, jnp.asarray([64 + 3]), x, quantize=True)
    page = np.asarray(cache).view(np.uint8)[1].copy()
    data, scales = (np.asarray(part)[0] for part in kv_pages.pack(x))
    np.testing.assert_array_equal(page[576 * 3 : 576 * 4], data)
    np.testing.assert_array_equal(page[576 * 64 + 8 * 3 : 576 * 64 + 8 * 4], scales)
    np.testing.assert_array_equal(data[448:].view(ml_dtypes.bfloat16), np.asarray(x)[0, 448:])
    page[576 * 3 : 576 * 4] = page[576 * 64 + 24 : 576 * 64 + 32] = 0
    assert not page.any()


@pytest.mark.contract("KV-4")
def test_padding_is_neither_read_nor_written(rng):
    x, layout = latents(rng, 128), PageLayout.padded(64, 2)
    clean = kv_pages.write(layout.zeros(), layout, jnp.arange(128), x, quantize=True)
    poisoned = kv_pages.write(jnp.full(layout.shape, -1), layout, jnp.arange(128), x, quantize=True)
    raw = np.asarray(poisoned).view(np.uint8).copy()
    assert (raw[:, layout.payload_bytes :] == 0xFF).all()
    raw[:, 576 * 64 + 7 : layout.payload_bytes : 8] = 0xFF  # the pad byte of every row's scales
    everything = jnp.arange(128)
    np.testing.assert_array_equal(
        np.asarray(kv_pages.gather(jnp.asarray(raw.view(np.int32)), layout, everything)),
        np.asarray(kv_pages.gather(clean, layout, everything)),
    )


@pytest.mark.contract("KV-5")
def test_payload_does_not_depend_on_stride_or_offset(rng):
    x, slots = latents(rng, 70), jnp.arange(70)
    layouts = [PageLayout(64, 37_376, 2), PageLayout.padded(64, 2), PageLayout(64, 1_039_680, 2, base_offset=46_080)]
    payloads = []
    for layout in layouts:
        raw = np.asarray(kv_pages.write(layout.zeros(), layout, slots, x, quantize=True)).view(np.uint8)
        payloads.append(raw[:, layout.base_offset :][:, : layout.payload_bytes])
    np.testing.assert_array_equal(payloads[0], payloads[1])
    np.testing.assert_array_equal(payloads[0], payloads[2])


@pytest.mark.contract("KV-7")
@pytest.mark.parametrize("layout", [PageLayout.padded(64, 2), DenseLayout(64, 2, 512, jnp.dtype(jnp.bfloat16))])
def test_negative_slots_write_nothing_and_read_zeros(rng, layout):
    before = kv_pages.write(layout.zeros(), layout, jnp.arange(128), latents(rng, 128), quantize=True)
    after = kv_pages.write(before, layout, jnp.full(7, -1), latents(rng, 7), quantize=True)
    np.testing.assert_array_equal(np.asarray(after), np.asarray(before))
    assert not np.asarray(kv_pages.gather(before, layout, jnp.asarray([-1]))).any()


def test_dense_rows_hold_the_same_values_as_packed_ones(rng):
    x, packed = latents(rng, 10, 3.0), PageLayout.padded(64, 1)
    dense = DenseLayout(64, 1, 512, jnp.dtype(jnp.bfloat16))
    slots = jnp.arange(10)
    rows = [
        kv_pages.gather(kv_pages.write(layout.zeros(), layout, slots, x, quantize=True), layout, slots)
        for layout in (packed, dense)
    ]
    np.testing.assert_array_equal(np.asarray(rows[0]), np.asarray(rows[1]))
    exact = kv_pages.write(dense.zeros(), dense, slots, x, quantize=False)
    np.testing.assert_array_equal(np.asarray(exact)[:10], np.asarray(x))


def test_bad_arguments_are_named():
    layout = PageLayout.padded(64, 2)
    cache, slots, x = layout.zeros(), jnp.arange(3), jnp.zeros((3, 512))
    with pytest.raises(ValueError, match=r"cache must have shape \[2, 9360\]"):
        kv_pages.write(cache[:1], layout, slots, x, quantize=True)
    with pytest.raises(TypeError, match="cache must be int32, got float32"):
        kv_pages.write(cache.astype(jnp.float32), layout, slots, x, quantize=True)
    with pytest.raises(ValueError, match=r"latents must have shape \[3, 512\], got \[2, 512\]"):
        kv_pages.write(cache, layout, slots, x[:2], quantize=True)
    with pytest.raises(TypeError, match="slots must hold integers"):
        kv_pages.write(cache, layout, slots.astype(jnp.float32), x, quantize=True)
    with pytest.raises(ValueError, match="expected quantize=True"):
        kv_pages.write(cache, layout, slots, x, quantize=False)
    with pytest.raises(ValueError, match=r"implementation must be one of \['reference'\], got 'cuda'"):
        kv_pages.gather(cache, layout, slots, implementation="cuda")
