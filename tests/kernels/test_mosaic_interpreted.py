"""The Hopper kernel of sparse MLA in Pallas' GPU interpreter, with race detection: small shapes, exact contracts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_pages
from pallas_kernels.compressed_mla import mosaic_sm90, reference
from pallas_kernels.pages import PageLayout

WIDTH = 512
SCALE = WIDTH**-0.5

attend = functools.partial(mosaic_sm90.attend, interpret=True)


class Case:
    """Two packed caches with random rows, and one list of slots per query row for each of them."""

    def __init__(self, rng, rows, heads, widths, page_sizes=(64, 2)):
        self.rng, self.rows, self.groups = rng, rows, []
        for width, page_size in zip(widths, page_sizes, strict=False):
            layout = PageLayout.padded(page_size, 256 // page_size)
            x = jnp.asarray(rng.standard_normal((layout.num_slots, WIDTH)), jnp.bfloat16)
            cache = kv_pages.write(layout.zeros(), layout, jnp.arange(layout.num_slots), x, quantize=True)
            slots = rng.integers(0, layout.num_slots, (rows, width)).astype(np.int32)
            self.groups.append((cache, layout, slots, np.full(rows, width, np.int32)))
        self.q = jnp.asarray(rng.standard_normal((rows, heads, WIDTH)), jnp.bfloat16)
        self.sink = jnp.asarray(rng.standard_normal(heads), jnp.float32)

    def run(self, implementation, rows=slice(None), **options):
        groups = [(c, layout, jnp.asarray(s[rows]), jnp.asarray(n[rows])) for c, layout, s, n in self.groups]
        out, lse = implementation(self.q[rows], groups, self.sink, SCALE, **options)
        return np.asarray(out, np.float32), np.asarray(lse)


def check(got, want):
    """P is rounded to bfloat16 (2**-9 each, random signs), twice where tiles have other maxima, and the output once."""
    (out, lse), (want_out, want_lse) = got, want
    assert np.sqrt(((out - want_out) ** 2).sum() / (want_out**2).sum()) < 6e-3
    np.testing.assert_allclose(lse, want_lse, atol=2e-4)  # logits are rounded to multiples of 2**-14


@pytest.mark.contract("AT-5")
@pytest.mark.parametrize(("heads", "widths"), [(64, (128, 40)), (16, (70,)), (96, (20, 130))])
def test_equals_the_reference(rng, heads, widths):
    """One list and two, heads of less and more than one block, chunks that no list fills. In one CTA and split over
    several it is the same to the last bit."""
    case = Case(rng, 2, heads, widths)
    whole = case.run(attend, num_ctas=2, split=False)
    check(whole, case.run(reference.attend))
    for got, want in zip(case.run(attend, num_ctas=3, split=True), whole, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("split", [False, True])
def test_dead_entries_and_lengths(rng, split):
    """Negative slots among the live ones, slots beyond the cache's end, lengths of 0 and rows without any key."""
    case = Case(rng, 3, 16, (90, 60))
    for _, layout, slots, lengths in case.groups:
        slots[:, ::3] = -1
        lengths[:] = (slots.shape[1], 0, slots.shape[1] // 2)
        slots[0, lengths[0] :] = layout.num_slots + 7
    got = case.run(attend, num_ctas=2, split=split)
    check(got, case.run(reference.attend))
    assert not got[0][1].any()
    np.testing.assert_allclose(got[1][1], case.sink, atol=2e-4)


def test_what_dead_entries_name_is_never_read(rng):
    """NaN in rows that only entries behind the length, or nobody, names does not reach the output."""
    case = Case(rng, 1, 16, (100,))
    cache, layout, slots, lengths = case.groups[0]
    lengths[:] = 37
    slots[:, :37] %= 100
    slots[:, 37:] = 101
    clean = case.run(attend)
    poison = jnp.full((1, WIDTH), jnp.nan, jnp.bfloat16)
    case.groups[0] = (kv_pages.write(cache, layout, jnp.array([101]), poison, quantize=True), layout, slots, lengths)
    np.testing.assert_array_equal(case.run(attend)[0], clean[0])


@pytest.mark.contract("PR-3")
def test_a_row_alone_equals_the_row_among_others(rng):
    """Bitwise, whatever the number of rows and of CTAs."""
    case = Case(rng, 3, 16, (64, 130))
    out, lse = case.run(attend, num_ctas=2, split=False)
    for row in (0, 2):
        one, one_lse = case.run(attend, rows=slice(row, row + 1))
        np.testing.assert_array_equal(one[0], out[row])
        np.testing.assert_array_equal(one_lse[0], lse[row])


@pytest.mark.parametrize(("heads", "split"), [(16, False), (64, True), (128, False)])
def test_lowers_for_cuda_without_a_gpu(heads, split):
    """The whole kernel with its inline code goes through Mosaic's own lowering."""
    layout = PageLayout.padded(64, 16)

    def call(q, cache, slots, lengths, sink):
        return mosaic_sm90.attend(q, [(cache, layout, slots, lengths)], sink, SCALE, split=split)

    shapes = (
        jax.ShapeDtypeStruct((6, heads, WIDTH), jnp.bfloat16),
        jax.eval_shape(layout.zeros),
        jax.ShapeDtypeStruct((6, 128), jnp.int32),
        jax.ShapeDtypeStruct((6,), jnp.int32),
        jax.ShapeDtypeStruct((heads,), jnp.float32),
    )
    assert "mosaic_gpu" in jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
