"""Compressed sparse MLA: one set of cases for every implementation."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import compressed_mla, kv_pages
from pallas_kernels.pages import DenseLayout, PageLayout

IMPLEMENTATIONS = ["reference"]
HEADS, WIDTH = 4, 512
F32 = jnp.dtype(jnp.float32)


class Case:
    """Random caches, slot lists and queries; ``dense`` rows are float32, packed ones the 584-byte format."""

    def __init__(self, rng, rows, window, indexed, *, dense=True, dtype=jnp.float32):
        def layout(page_size, pages):
            return DenseLayout(page_size, pages, WIDTH, F32) if dense else PageLayout.padded(page_size, pages)

        self.layouts = layout(64, 3), layout(2, 20)
        self.caches, self.slots, self.lengths, self.keys = [], [], [], []
        for one, width in zip(self.layouts, (window, indexed), strict=True):
            x = jnp.asarray(rng.standard_normal((one.num_slots, WIDTH)), jnp.float32)
            cache = kv_pages.write(one.zeros(), one, jnp.arange(one.num_slots), x, quantize=not dense)
            self.caches.append(cache)
            self.keys.append(np.asarray(kv_pages.gather(cache, one, jnp.arange(one.num_slots)), np.float64))
            self.slots.append(np.stack([rng.permutation(one.num_slots)[:width] for _ in range(rows)]).astype(np.int32))
            self.lengths.append(rng.integers(0, width + 1, rows).astype(np.int32))
        self.q = jnp.asarray(rng.standard_normal((rows, HEADS, WIDTH)), dtype)
        self.sink = jnp.asarray(rng.standard_normal(HEADS), jnp.float32)
        self.scale = WIDTH**-0.5

    def run(self, implementation=None, *, indexed=True, rows=slice(None), **changes):
        arguments = {
            "indexed_cache": self.caches[1],
            "indexed_layout": self.layouts[1],
            "indexed_slots": jnp.asarray(self.slots[1][rows]),
            "indexed_lengths": jnp.asarray(self.lengths[1][rows]),
        }
        return compressed_mla.attend(
            self.q[rows],
            self.caches[0],
            self.layouts[0],
            jnp.asarray(self.slots[0][rows]),
            jnp.asarray(self.lengths[0][rows]),
            **(arguments if indexed else {}),
            **{"attn_sink": self.sink, "sm_scale": self.scale, "implementation": implementation, **changes},
        )

    def expected(self, groups=(0, 1)):
        """float64, row by row."""
        out, lse = [], []
        for n, q in enumerate(np.asarray(self.q, np.float64)):
            keys = [self.keys[g][s] for g in groups for s in self.slots[g][n, : self.lengths[g][n]] if s >= 0]
            logits = self.scale * q @ np.stack([*keys, np.zeros(WIDTH)]).T
            logits[:, -1] = np.asarray(self.sink)  # the sink: a logit without a value
            total = np.exp(logits).sum(1)
            values = np.stack([*keys, np.zeros(WIDTH)])
            out.append(np.exp(logits) @ values / total[:, None])
            lse.append(np.log(total))
        return np.stack(out), np.stack(lse)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_matches_float64(rng, implementation, dense, indexed):
    case = Case(rng, 13, 33, 21, dense=dense)
    out, lse = case.run(implementation, indexed=indexed, return_lse=True)
    want, want_lse = case.expected((0, 1) if indexed else (0,))
    np.testing.assert_allclose(out, want, atol=2e-5)  # float32 sums of 55 terms of order 1
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


def test_bfloat16_queries(rng, implementation):
    case = Case(rng, 9, 40, 20, dense=False, dtype=jnp.bfloat16)
    out = case.run(implementation)
    assert out.dtype == jnp.bfloat16
    # Weights and results are rounded to 8 bits: 2**-8 relative each, on values of order 1.
    np.testing.assert_allclose(np.asarray(out, np.float32), case.expected()[0], atol=2 * 2**-8)


def test_rows_without_keys_are_zero_and_garbage_is_not_read(rng, implementation):
    case = Case(rng, 4, 8, 8)
    case.lengths = [np.array([0, 3, 0, 8], np.int32), np.array([0, 0, 2, 8], np.int32)]
    case.slots[0][1, 2] = -1  # a dead entry inside the list
    case.caches = [c.at[::7].set(jnp.nan) for c in case.caches]
    for g in (0, 1):
        live = [s for s in range(case.layouts[g].num_slots) if s % 7]
        case.slots[g] = np.where(case.slots[g] >= 0, np.resize(live, case.slots[g].shape), -1).astype(np.int32)
        for n in range(4):
            case.slots[g][n, case.lengths[g][n] :] = 7  # behind the end: rows that hold NaN
    out = np.asarray(case.run(implementation))
    assert not out[0].any()
    np.testing.assert_allclose(out, case.expected()[0], atol=2e-5)


@pytest.mark.contract("T10")
def test_a_row_does_not_depend_on_the_others(rng, implementation):
    case = Case(rng, 19, 24, 12, dense=False, dtype=jnp.bfloat16)
    together = np.asarray(case.run(implementation)).view(np.uint16)
    for rows in (slice(0, 1), slice(3, 9), slice(18, 19)):
        np.testing.assert_array_equal(np.asarray(case.run(implementation, rows=rows)).view(np.uint16), together[rows])


@pytest.mark.contract("PV-13", "PV-15")
def test_output_does_not_depend_on_the_page_stride(rng, implementation):
    case = Case(rng, 6, 24, 12, dense=False, dtype=jnp.bfloat16)
    want = np.asarray(case.run(implementation)).view(np.uint16)
    payload = [layout.payload_bytes for layout in case.layouts]
    for strides in ((37_376, 1_168), (1_039_680, 4_096)):
        other = Case.__new__(Case)
        other.__dict__ = {**case.__dict__}
        other.layouts = tuple(
            PageLayout(old.page_size, stride, old.num_pages) for old, stride in zip(case.layouts, strides, strict=True)
        )
        other.caches = []
        for cache, layout, size in zip(case.caches, other.layouts, payload, strict=True):
            raw = np.full((layout.num_pages, layout.page_stride), 0xFF, np.uint8)  # poison in all padding
            raw[:, :size] = np.asarray(cache).view(np.uint8)[:, :size]
            other.caches.append(jnp.asarray(raw.view(np.int32)))
        np.testing.assert_array_equal(np.asarray(other.run(implementation)).view(np.uint16), want)


def test_bad_arguments_are_named(rng):
    case = Case(rng, 3, 8, 8)
    with pytest.raises(ValueError, match=r"attn_sink must have shape \[4\], got \[3\]"):
        case.run(attn_sink=case.sink[:3])
    with pytest.raises(ValueError, match="must be provided together"):
        case.run(indexed_cache=None, indexed=False, indexed_layout=case.layouts[1])
    narrow = DenseLayout(64, 3, 256, F32)
    with pytest.raises(ValueError, match=r"q must have shape \[rows, heads, 256\]"):
        compressed_mla.attend(
            case.q,
            narrow.zeros(),
            narrow,
            jnp.asarray(case.slots[0]),
            jnp.asarray(case.lengths[0]),
            attn_sink=case.sink,
            sm_scale=1.0,
        )
    case.q = case.q.astype(jnp.float16)
    with pytest.raises(TypeError, match="q must be float32 or bfloat16, got float16"):
        case.run()


def test_reference_is_not_fooled_by_large_logits(rng):
    case = Case(rng, 2, 8, 8)
    case.q = case.q * 1e4
    out, lse = case.run(return_lse=True)
    assert np.isfinite(np.asarray(out)).all()
    assert np.isfinite(np.asarray(lse)).all()
    assert ml_dtypes.finfo(ml_dtypes.bfloat16).max > np.abs(out).max()
