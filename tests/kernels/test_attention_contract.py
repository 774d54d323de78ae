"""The contract of compressed sparse MLA (serving contracts, section 3), for every implementation behind the public
function: the reference, the Hopper kernel in Pallas' interpreter with race detection, and the kernel on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compressed_mla, kv_pages
from pallas_kernels.compressed_mla import Capacity, mosaic_sm90
from pallas_kernels.pages import PageLayout

WIDTH = 512
SCALE = WIDTH**-0.5


@pytest.fixture(params=["reference", "interpreted", pytest.param("mosaic", marks=pytest.mark.gpu)])
def implementation(request, monkeypatch):
    if request.param == "interpreted":
        kernel = functools.partial(mosaic_sm90.attend, interpret=True, num_ctas=2)
        for table in (compressed_mla.IMPLEMENTATIONS, compressed_mla.EXTEND_IMPLEMENTATIONS):
            monkeypatch.setitem(table, "mosaic", kernel)
        return "mosaic"
    return request.param


@pytest.fixture
def thorough(request):
    """Whether the implementation is fast enough for real shapes."""
    return "interpreted" not in request.node.callspec.id


@dataclasses.dataclass
class Group:
    layout: PageLayout
    cache: jax.Array
    slots: np.ndarray
    lengths: np.ndarray

    @classmethod
    def random(cls, rng, rows, width, page_size=64, slots=256, live=None, scale=0.05):
        layout = PageLayout.padded(page_size, -(-slots // page_size))
        x = jnp.asarray(scale * rng.standard_normal((layout.num_slots, WIDTH)), jnp.bfloat16)
        cache = kv_pages.write(layout.zeros(), layout, jnp.arange(layout.num_slots), x, quantize=True)
        entries = rng.integers(0, layout.num_slots, (rows, width)).astype(np.int32)
        return cls(layout, cache, entries, np.full(rows, width if live is None else live, np.int32))

    @functools.cached_property
    def rows(self):
        slots = jnp.arange(self.layout.num_slots)
        return np.asarray(kv_pages.gather(self.cache, self.layout, slots), np.float64)


def queries(rng, rows, heads, scale=0.04):
    return jnp.asarray(scale * rng.standard_normal((rows, heads, WIDTH)), jnp.bfloat16)


def run(function, q, window, indexed=None, *, sink=None, **options):
    second = {}
    if indexed is not None:
        second = {
            "indexed_cache": indexed.cache,
            "indexed_layout": indexed.layout,
            "indexed_slots": jnp.asarray(indexed.slots),
            "indexed_lengths": jnp.asarray(indexed.lengths),
        }
    first = (window.cache, window.layout, jnp.asarray(window.slots), jnp.asarray(window.lengths))
    if function is not compressed_mla.partials:
        options = {"return_lse": True, "attn_sink": None if sink is None else jnp.asarray(sink), **options}
    result = function(q, *first, **second, sm_scale=SCALE, **options)
    return [np.asarray(x, np.float32) for x in result]


attend = functools.partial(run, compressed_mla.attend)


def expected(q, groups, sink=None):
    """float64, row by row, from the decoded caches."""
    q = np.asarray(q, np.float64)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for n in range(len(q)):
        keys = [g.rows[s] for g in groups for s in g.slots[n, : max(g.lengths[n], 0)] if 0 <= s < g.layout.num_slots]
        logits = SCALE * q[n] @ np.array(keys).reshape(-1, WIDTH).T
        if sink is not None:
            logits = np.concatenate([logits, np.asarray(sink, np.float64)[:, None]], axis=1)
        if logits.shape[1]:
            top = logits.max(1, keepdims=True)
            weights = np.exp(logits - top)
            lse[n] = np.log(weights.sum(1)) + top[:, 0]
            if keys:
                out[n] = weights[:, : len(keys)] @ np.stack(keys) / weights.sum(1, keepdims=True)
    return out, lse


def check(got, want):
    """The contract's tolerances for data of this scale (section 3.7)."""
    (out, lse), (want_out, want_lse) = got, want
    error = out - want_out
    if want_out.any():
        assert np.sqrt((error**2).sum() / (want_out**2).sum()) <= 5e-3
        assert (out * want_out).sum() / np.linalg.norm(out) / np.linalg.norm(want_out) >= 0.9999
    assert np.abs(error).max() <= 2e-3
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)


@pytest.mark.contract("AT-1")
def test_two_caches_with_other_page_sizes(rng, implementation, thorough):
    """Pages of 256 and of 2; the compiled step then serves other lengths."""
    window = Group.random(rng, 1, 16, page_size=256, live=11)
    indexed = Group.random(rng, 1, 16, page_size=2, live=7)
    q, sink = queries(rng, 1, 8), np.linspace(-0.1, 0.1, 8, dtype=np.float32)

    traces = []

    @jax.jit
    def step(lengths):
        traces.append(lengths)
        return compressed_mla.attend(
            q,
            window.cache,
            window.layout,
            jnp.asarray(window.slots),
            lengths[0],
            indexed_cache=indexed.cache,
            indexed_layout=indexed.layout,
            indexed_slots=jnp.asarray(indexed.slots),
            indexed_lengths=lengths[1],
            attn_sink=jnp.asarray(sink),
            sm_scale=SCALE,
            return_lse=True,
            implementation=implementation,
        )

    for lengths in ((11, 7), (1, 0), (0, 1)):
        window.lengths[:], indexed.lengths[:] = lengths
        got = step([jnp.asarray(window.lengths), jnp.asarray(indexed.lengths)])
        check([np.asarray(x, np.float32) for x in got], expected(q, [window, indexed], sink))
    assert len(traces) == 1 or not thorough  # the interpreter changes JAX's configuration while it runs


@pytest.mark.contract("AT-2")
@pytest.mark.parametrize("heads", [8, 32, 64])
def test_rows_and_heads_of_the_model(rng, implementation, thorough, heads):
    """Widths 128 and 512 (in the interpreter 40 and 130, one and six rows)."""
    for rows in (1, 6, 24, 384) if thorough else (2,):
        widths = (128, 512) if thorough else (40, 130)
        groups = [Group.random(rng, rows, width, slots=1024) for width in widths]
        q, sink = queries(rng, rows, heads), rng.standard_normal(heads).astype(np.float32)
        some = slice(0, 24)  # float64 is slow
        got = attend(q, *groups, sink=sink, implementation=implementation)
        few = [dataclasses.replace(g, slots=g.slots[some], lengths=g.lengths[some]) for g in groups]
        check([x[some] for x in got], expected(q[some], few, sink))


@pytest.mark.contract("AT-3")
@pytest.mark.parametrize("with_sink", [True, False])
def test_lists_without_keys(rng, implementation, with_sink):
    """A list of -1 with length 1, lengths of 0 (also negative), and a window list of no width."""
    window, indexed = Group.random(rng, 3, 20, live=9), Group.random(rng, 3, 4)
    indexed.slots[:], indexed.lengths[:] = -1, 1
    window.lengths[1:] = (0, -3)
    q, sink = queries(rng, 3, 8), rng.standard_normal(8).astype(np.float32) if with_sink else None
    out, lse = attend(q, window, indexed, sink=sink, implementation=implementation)
    check((out, lse), expected(q, [window, indexed], sink))
    assert not out[1:].any()
    if with_sink:
        np.testing.assert_allclose(lse[1:], np.stack([sink, sink]), atol=2e-4)
    else:
        assert (lse[1:] == -np.inf).all()
    empty, indexed = Group.random(rng, 3, 0), Group.random(rng, 3, 20)
    got = attend(q, empty, indexed, sink=sink, implementation=implementation)
    check(got, expected(q, [indexed], sink))


@pytest.mark.contract("AT-4")
def test_log_sum_exp(rng, implementation):
    group, q = Group.random(rng, 2, 50), queries(rng, 2, 8)
    sink = rng.standard_normal(8).astype(np.float32)
    call = functools.partial(attend, q, group, implementation=implementation)
    with_sink, base2, without = call(sink=sink)[1], call(sink=sink, lse_base="2")[1], call()[1]
    np.testing.assert_allclose(base2 * math.log(2), with_sink, rtol=1e-6)
    np.testing.assert_allclose(with_sink, np.logaddexp(without, sink), atol=2e-4)  # logits have a grid of 2**-14
    with pytest.raises(ValueError, match="lse_base must be 'e' or '2', got '10'"):
        call(lse_base="10")


@pytest.mark.contract("AT-5", "AT-12")
@pytest.mark.parametrize("splits", [1, 2, 5, 11])
def test_splits_and_their_merge(rng, implementation, thorough, splits):
    """Any number of parts, more than there are windows of 64 entries too. float32 partials differ by rounding of sums
    only; bfloat16 ones are rounded once more."""
    if not thorough and splits != 2:
        pytest.skip("several seconds each in the interpreter, which differs from the others in nothing that splits see")
    groups = [Group.random(rng, 2, 130), Group.random(rng, 2, 200, page_size=2, live=150)]
    q, sink = queries(rng, 2, 8), jnp.asarray(rng.standard_normal(8), jnp.float32)
    if implementation == "reference":
        whole = attend(q.astype(jnp.float32), *groups, sink=sink, implementation=implementation)
        out, lse = run(
            compressed_mla.partials,
            q.astype(jnp.float32),
            *groups,
            num_splits=splits,
            implementation=implementation,
        )
        merged = compressed_mla.merge(jnp.asarray(out), jnp.asarray(lse), sink)
        np.testing.assert_allclose(merged[0], whole[0], atol=1e-5)
        np.testing.assert_allclose(merged[1], whole[1], atol=1e-5)
    out, lse = run(compressed_mla.partials, q, *groups, num_splits=splits, implementation=implementation)
    merged = compressed_mla.merge(jnp.asarray(out), jnp.asarray(lse), sink)
    check([np.asarray(x) for x in merged], expected(q, groups, sink))


@pytest.mark.contract("AT-12")
def test_merge_serves_fewer_rows_and_parts_without_another_compile(rng):
    """A program for 128 rows and 2 parts; 113 rows and 1 part are live and the rest holds NaN."""
    merge = jax.jit(compressed_mla.merge)
    out = rng.standard_normal((128, 2, 4, 16)).astype(np.float32)
    lse = rng.standard_normal((128, 2, 4)).astype(np.float32)
    sink = rng.standard_normal(4).astype(np.float32)
    both, _ = merge(out, lse, sink, jnp.int32(2))
    weights = np.exp(np.concatenate([lse, np.broadcast_to(sink, (128, 1, 4))], axis=1).astype(np.float64))
    want = (weights[:, :2, :, None] * out).sum(1) / weights.sum(1)[..., None]
    np.testing.assert_allclose(both, want, atol=1e-5)
    out[113:], lse[113:], out[:, 1], lse[:, 1] = np.nan, -np.inf, np.nan, np.nan
    one, one_lse = merge(out, lse, sink, jnp.int32(1))
    assert merge._cache_size() == 1
    keep = 1 / (1 + np.exp(sink - lse[:113, 0].astype(np.float64)))
    np.testing.assert_allclose(one[:113], out[:113, 0] * keep[..., None], atol=1e-5)
    assert not np.asarray(one[113:]).any()
    np.testing.assert_allclose(one_lse[113:], np.broadcast_to(sink, (15, 4)), atol=1e-6)


@pytest.mark.contract("AT-6")
def test_a_donated_output_is_written_everywhere(rng, implementation):
    """NaN in the memory that the result takes; rows without keys are exactly zero."""
    group, q = Group.random(rng, 4, 30), queries(rng, 4, 16)
    group.lengths[2:] = 0

    @functools.partial(jax.jit, donate_argnums=1)
    def step(q, out):
        return compressed_mla.attend(
            q,
            group.cache,
            group.layout,
            jnp.asarray(group.slots),
            jnp.asarray(group.lengths),
            sm_scale=SCALE,
            out=out,
            implementation=implementation,
        )

    memory = jnp.full(q.shape, jnp.nan, q.dtype)
    out = np.asarray(step(q, memory), np.float32)
    assert memory.is_deleted()
    assert np.isfinite(out).all()
    assert not out[2:].any()
    assert out[:2].any(axis=-1).all()


@pytest.mark.contract("AT-7")
@pytest.mark.parametrize("function", [compressed_mla.attend, compressed_mla.extend])
def test_runs_are_bit_identical(rng, implementation, thorough, function):
    groups = [Group.random(rng, 2, width) for width in (40, 130)]
    call = functools.partial(run, function, queries(rng, 2, 8), *groups, implementation=implementation)
    first = call()
    for _ in range(20 if thorough else 1):
        for got, want in zip(call(), first, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.contract("AT-8", "PV-13", "PV-14")
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_what_nobody_names_may_hold_anything(rng, implementation, byte):
    """Pages without a listed slot, and the padding of all pages, filled with NaN patterns; in another page stride."""
    group, q = Group.random(rng, 2, 30), queries(rng, 2, 8)
    group.slots %= 128  # pages 0 and 1 of 4
    want = attend(q, group, implementation=implementation)
    old = group.layout
    layout = PageLayout(old.page_size, old.page_stride + 4096, old.num_pages, base_offset=64)
    raw = np.full((layout.num_pages, layout.page_stride), byte, np.uint8)
    raw[:2, 64 : 64 + old.payload_bytes] = np.asarray(group.cache).view(np.uint8)[:2, : old.payload_bytes]
    other = dataclasses.replace(group, layout=layout, cache=jnp.asarray(raw.view(np.int32)))
    for got, expect in zip(attend(q, other, implementation=implementation), want, strict=True):
        np.testing.assert_array_equal(got, expect)


@pytest.mark.contract("AT-9", "AT-10")
def test_lists_are_multisets(rng, implementation):
    """A slot listed twice counts twice, in one list or in both; the order of entries moves only rounding."""
    group, q = Group.random(rng, 2, 40), queries(rng, 2, 8, scale=1.0)
    group.slots[:, 1:20] = group.slots[:, :1]
    got = attend(q, group, implementation=implementation)
    want = expected(q, [group])
    check(got, want)
    once = dataclasses.replace(group, slots=group.slots[:, 19:], lengths=group.lengths - 19)
    assert np.abs(expected(q, [once])[1] - want[1]).max() > 0.1
    mixed = dataclasses.replace(group, slots=rng.permuted(group.slots, axis=1))
    again = attend(q, mixed, implementation=implementation)
    assert np.linalg.norm(again[0] - got[0]) <= 1e-3 * np.linalg.norm(got[0])
    np.testing.assert_allclose(again[1], got[1], rtol=1e-3)


@pytest.mark.contract("AT-11")
def test_errors_name_what_was_expected(rng):
    group, q = Group.random(rng, 3, 20), queries(rng, 3, 8)
    first = {
        "window_cache": group.cache,
        "window_layout": group.layout,
        "window_slots": jnp.asarray(group.slots),
        "window_lengths": jnp.asarray(group.lengths),
    }
    second = {name.replace("window", "indexed"): value for name, value in first.items()}
    slots, lengths = first["window_slots"], first["window_lengths"]
    wide = jnp.zeros((3, 8, 576), jnp.bfloat16)
    cases = [
        (ValueError, r"shape \[rows, heads, 512\].* got \[3, 8, 576\]", {"q": wide}),
        (ValueError, r"shape \[rows, heads, width\], got \[8, 512\]", {"q": q[0]}),
        (TypeError, "q must be float32 or bfloat16, got float16", {"q": q.astype(jnp.float16)}),
        (TypeError, "window_slots must be int32, got uint32", {"window_slots": slots.astype(jnp.uint32)}),
        (TypeError, "window_lengths must be int32, got int8", {"window_lengths": lengths.astype(jnp.int8)}),
        (ValueError, "row count must match that of q, got .2, 20.", {"window_slots": slots[:2]}),
        (ValueError, r"window_lengths must have shape \[3\], got \[3, 1\]", {"window_lengths": lengths[:, None]}),
        (ValueError, "must be provided together", {**second, "indexed_lengths": None}),
        (ValueError, "must be provided together", {"indexed_layout": group.layout}),
        (TypeError, "indexed_slots must be int32", {**second, "indexed_slots": slots.astype(jnp.int16)}),
        (ValueError, r"attn_sink must have shape \[8\], got \[7\]", {"attn_sink": jnp.zeros(7)}),
        (TypeError, "attn_sink must be float32, got bfloat16", {"attn_sink": jnp.zeros(8, jnp.bfloat16)}),
        (ValueError, r"out must have shape \[3, 8, 512\], got \[3, 4, 512\]", {"out": q[:, :4]}),
        (TypeError, "out must be bfloat16 as q, got float32", {"out": q.astype(jnp.float32)}),
        (ValueError, "planned 4 heads, got 8", {"capacity": Capacity(3, 4, 20)}),
        (ValueError, "rows must be at most the planned 2, got 3", {"capacity": Capacity(2, 8, 20)}),
        (ValueError, "window_slots width must be at most the planned 16, got 20", {"capacity": Capacity(3, 8, 16)}),
        (ValueError, "indexed_slots width .* planned 0, got 20", {**second, "capacity": Capacity(3, 8, 20)}),
    ]
    for function in (compressed_mla.attend, compressed_mla.extend):
        for error, match, change in cases:
            with pytest.raises(error, match=match):
                function(**{"q": q, "sm_scale": SCALE, **first, **change})
    with pytest.raises(ValueError, match="num_splits must be positive, got 0"):
        compressed_mla.partials(q, **first, sm_scale=SCALE, num_splits=0)


def test_lists_can_be_checked_on_the_host(rng):
    layout = PageLayout.padded(64, 2)
    slots = np.array([[3, 4, -1, -1], [5, -1, 6, -1], [127, 0, 1, 2]], np.int32)
    compressed_mla.check_lists(layout, slots, np.array([3, 2, 4]))
    with pytest.raises(ValueError, match="interior sentinel at row 1"):
        compressed_mla.check_lists(layout, slots, np.array([3, 3, 4]))
    with pytest.raises(ValueError, match="topk length must be non-negative, got -2 at row 2"):
        compressed_mla.check_lists(layout, slots, np.array([3, 2, -2]))
    slots[2, 3] = 128
    with pytest.raises(ValueError, match="expected less than 128, got 128 at row 2"):
        compressed_mla.check_lists(layout, slots, np.array([3, 2, 4]))


def test_slots_beyond_the_cache_are_no_keys(rng, implementation):
    group, q = Group.random(rng, 2, 30), queries(rng, 2, 8)
    group.slots[:, ::4] = group.layout.num_slots + np.array([[0], [10**6]], np.int32)
    check(attend(q, group, implementation=implementation), expected(q, [group]))
