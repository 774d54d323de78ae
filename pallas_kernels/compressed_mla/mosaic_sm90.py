"""Compressed sparse MLA on Hopper: a Mosaic GPU kernel.

A CTA takes (row, block of 64 heads) items. Two warpgroups gather and dequantise 64 keys each of a chunk of 128 keys;
two warpgroups multiply: each takes the scores of one tile of keys and then, with the weights of both, one half of the
output columns. ``docs/kernels.md`` draws it.

Every rescaling is by a power of two and therefore exact, so a row's result depends on nothing but the row: neither on
the other rows nor on whether its chunks were summed by one CTA or apart (``split``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compressed_mla.mosaic_gather import (
    BLOCK,
    BLOCKS,
    HEADS,
    PIECE,
    TILE,
    WIDTH,
    Gather,
    fence,
    load_piece,
    opaque_zero,
    plgpu,
    store_pieces,
)
from pallas_kernels.compressed_mla.reference import KeyGroup
from pallas_kernels.kv_pages.reference import gather
from pallas_kernels.pages import PageLayout

CHUNK = 2 * TILE  # keys whose weights share one maximum and one sum
# Blocks come and go in pairs: the two halves of the output finish blocks s and s + 4 together.
STAGES = BLOCKS // 2
ORDER = tuple(b for stage in range(STAGES) for b in (stage, stage + STAGES))
PIECES = WIDTH // PIECE
LOG2E = math.log2(math.e)
# Adding this rounds a base-2 logit to a multiple of 2**-14: then subtracting an integer maximum is exact.
GRID = 768.0
LOWEST = -(2.0**30)

_W = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def _full(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _across(x: jax.Array, like: jax.Array) -> jax.Array:
    """A value per row over all columns."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def _round(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _row(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_ROW, optimized=False)


def _chunks(width: Any) -> Any:
    return (width + (CHUNK - 1)) // CHUNK


def _finish(top: jax.Array, sums: Sequence[jax.Array], sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What an accumulator relative to ``2**top`` is multiplied by, and the log-sum-exp."""
    new = jnp.maximum(top, _round(sink))
    keep = jnp.exp2(top - new)
    whole = (sums[0] + sums[1]) * keep + jnp.exp2(sink - new)
    return jnp.where(whole > 0, keep / whole, 0.0), jnp.where(whole > 0, (new + jnp.log2(whole)) / LOG2E, -jnp.inf)


def _each_part(heads: int, block: jax.Array, do: Callable[[int], None]) -> None:
    """``do`` with the number of heads of a block, which copies must know when they are compiled."""
    blocks, rest = -(-heads // HEADS), heads % HEADS
    if not rest or blocks == 1:
        do(rest or HEADS)
    else:
        pl.when(block < blocks - 1)(lambda: do(HEADS))
        pl.when(block == blocks - 1)(lambda: do(rest))


def attend(
    q: jax.Array,
    groups: Sequence[KeyGroup],
    attn_sink: jax.Array | None,
    sm_scale: float,
    out_dtype: jnp.dtype | None = None,
    *,
    num_ctas: int = 132,
    regs: tuple[int, int] = (192, 64),
    ahead: int = 1,
    split: bool | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``reference.attend`` on one Hopper GPU.

    ``split`` gives every chunk of a row a CTA of its own, and a second kernel adds them in the order of the unsplit
    sum: bit for bit the same, sooner where rows are few. By default shapes decide.
    """
    rows, heads, width = q.shape
    if q.dtype != jnp.bfloat16 or width != WIDTH:
        raise NotImplementedError(f"expected bfloat16 queries of width {WIDTH}, got {q.dtype} and {width}")
    if out_dtype not in (None, jnp.bfloat16):
        raise NotImplementedError(f"expected bfloat16 outputs, got {out_dtype}")
    if attn_sink is None:
        attn_sink = jnp.full(heads, -jnp.inf)
    if heads % 8:
        raise NotImplementedError(f"expected a multiple of 8 heads, got {heads}")
    if any(not isinstance(layout, PageLayout) for _, layout, _, _ in groups):
        raise NotImplementedError("expected packed caches (PageLayout)")
    groups = [group for group in groups if group[2].shape[1]]
    if not groups or not rows:
        raise NotImplementedError("expected rows and a slot list that is not empty")
    caches, layouts, slots, lengths = zip(*groups, strict=True)
    n = len(groups)
    slots = [x.astype(jnp.int32) for x in slots]
    lengths = [x.astype(jnp.int32) for x in lengths]
    widths = tuple(x.shape[1] for x in slots)
    chunks = sum(map(_chunks, widths))
    head_blocks = -(-heads // HEADS)
    cells = rows * head_blocks
    if split is None:
        split = chunks > 1 and cells * chunks <= num_ctas
    items = cells * chunks if split else cells
    num_ctas = min(num_ctas, items)
    gatherer = Gather(tuple(layouts), widths)
    logit_scale = sm_scale * LOG2E
    sink = jnp.pad(attn_sink.astype(jnp.float32) * LOG2E, (0, head_blocks * HEADS - heads)).reshape(head_blocks, HEADS)
    zero = (lambda: jnp.int32(0)) if interpret else opaque_zero
    order = (lambda: None) if interpret else fence

    def kernel(*refs: Any) -> None:
        q_g, sink_g, *rest = refs
        caches_g, slots_g, lengths_g, rest = rest[:n], rest[n : 2 * n], rest[2 * n : 3 * n], rest[3 * n :]
        outs, (q_s, k_s, p_s, f_s, q_full, q_empty, k_full, k_empty, meet) = rest[:-9], rest[-9:]
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")

        def plan(item: jax.Array) -> Any:
            """Row, head block and number of chunks of an item, and where the list of a chunk is."""
            cell = item // chunks if split else item
            row = cell // head_blocks
            limits = [jnp.clip(lengths_g[i][row], 0, widths[i]) for i in range(n)]
            first = jnp.int32(_chunks(widths[0])) if split else _chunks(limits[0])

            def locate(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                i = item % chunks if split else i
                if n == 1:
                    return jnp.int32(0), i, limits[0]
                second = i >= first
                return (
                    second.astype(jnp.int32),
                    jnp.where(second, i - first, i),
                    jnp.where(second, limits[1], limits[0]),
                )

            # A row without keys has one chunk of nothing, so that every item goes the same way.
            count = jnp.int32(1) if split else jnp.maximum(first + sum(map(_chunks, limits[1:]), 0), 1)
            return row, cell % head_blocks, count, locate

        def gather_meets() -> None:
            plgpu.barrier_arrive(meet)
            plgpu.barrier_wait(meet)

        def weigh(last: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Leaves a chunk's weights, relative to its maximum, in shared memory. Returns maximum and own sum."""

            def scores(ref: Any) -> jax.Array:
                for stage in range(STAGES):
                    z = zero()
                    plgpu.barrier_wait(k_full.at[wg * STAGES + stage + z])
                    order()
                    for b in (stage, stage + STAGES):
                        plgpu.wgmma(ref, q_s.at[b + z], k_s.at[wg + z, b].transpose((1, 0)))
                return ref[...]

            s = pl.run_scoped(scores, plgpu.ACC((HEADS, TILE), jnp.float32))
            pl.when(last)(lambda: plgpu.barrier_arrive(q_empty))
            bias = plgpu.load(f_s.at[wg], layout=_COLUMN, optimized=False)
            bias = plgpu.layout_cast(lax.broadcast_in_dim(bias, s.shape, [1]), _W)
            s = s * logit_scale + GRID + bias
            f_s[2 + wg] = jnp.maximum(_round(s.max(axis=1) - GRID), LOWEST)
            gather_meets()
            top = jnp.maximum(_row(f_s.at[2]), _row(f_s.at[3]))
            p = jnp.exp2(s - _across(top + GRID, s))
            p_s[wg] = p.astype(jnp.bfloat16)
            total = p.sum(axis=1)
            gather_meets()
            order()  # this warpgroup did not wait for the other tile itself
            return top, total

        def values(b: int) -> jax.Array:
            """The chunk's sum of weighted keys in column block ``b`` of this warpgroup, from zero."""

            def product(ref: Any) -> jax.Array:
                z = zero()
                for i in range(2):
                    plgpu.wgmma(ref, p_s.at[i + z], k_s.at[i, (wg + z) * 4 + b])
                return ref[...]

            x = pl.run_scoped(product, plgpu.ACC((HEADS, BLOCK), jnp.float32))
            plgpu.barrier_arrive(k_empty.at[b])
            return x

        def attend_item(row: jax.Array, block: jax.Array, count: jax.Array) -> None:
            def chunk(at: jax.Array, carry: Any) -> Any:
                acc, top, total = carry
                chunk_top, chunk_total = weigh(at + 1 == count)
                new = jnp.maximum(top, chunk_top)
                keep, gain = jnp.exp2(top - new), jnp.exp2(chunk_top - new)
                out = []
                for b in range(4):
                    x = values(b)
                    out.append(acc[b] * _across(keep, x) + x * _across(gain, x))
                return tuple(out), new, total * keep + chunk_total * gain

            nothing = tuple(_full(0.0, (HEADS, BLOCK), _W) for _ in range(4))
            acc, top, total = lax.fori_loop(
                0, count, chunk, (nothing, _full(LOWEST, (HEADS,), _ROW), _full(0.0, (HEADS,), _ROW))
            )
            f_s[4 + wg] = total
            gather_meets()
            factor, lse = _finish(top, [_row(f_s.at[4 + i]) for i in range(2)], _row(sink_g.at[block]))

            @pl.when(wg == 0)
            def _() -> None:
                f_s[6] = lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(f_s.at[6], outs[1].at[row, block])

            for b in range(4):
                p_s[wg] = (acc[b] * _across(factor, acc[b])).astype(jnp.bfloat16)
                plgpu.commit_smem()

                def copy(part: int, b: int = b) -> None:
                    plgpu.copy_smem_to_gmem(
                        p_s.at[wg, pl.ds(0, part)],
                        outs[0].at[row, pl.ds(block * HEADS, part), pl.ds((wg * 4 + b) * BLOCK, BLOCK)],
                    )

                _each_part(heads, block, copy)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def attend_chunk(item: jax.Array) -> None:
            sums_g, tops_g, totals_g = outs
            top, total = weigh(jnp.bool_(True))
            for b in range(4):
                x, index = values(b), (item * BLOCKS + wg * 4 + b) * 2
                if interpret:
                    sums_g[index], sums_g[index + 1] = x[:, :PIECE], x[:, PIECE:]
                else:
                    store_pieces(sums_g, index, x)
            f_s[4 + wg] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(f_s.at[4 + wg], totals_g.at[item, wg])

            @pl.when(wg == 0)
            def _() -> None:
                f_s[6] = top
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(f_s.at[6], tops_g.at[item])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def consume() -> None:
            plgpu.set_max_registers(regs[0], action="increase")
            for b in range(STAGES):
                plgpu.barrier_arrive(k_empty.at[b])
            plgpu.barrier_arrive(q_empty)

            @pl.loop(cta, items, step=num_ctas)
            def _(item: jax.Array) -> None:
                row, block, count, _ = plan(item)
                plgpu.barrier_wait(q_full)
                if split:
                    attend_chunk(item)
                else:
                    attend_item(row, block, count)

            plgpu.wait_smem_to_gmem(0)

        def produce() -> None:
            plgpu.set_max_registers(regs[1], action="decrease")
            tile = wg - 2

            @pl.loop(cta, items, step=num_ctas)
            def _(item: jax.Array) -> None:
                row, block, count, locate = plan(item)

                def copy(part: int) -> None:
                    for b in range(BLOCKS):
                        plgpu.copy_gmem_to_smem(
                            q_g.at[row, pl.ds(block * HEADS, part), pl.ds(b * BLOCK, BLOCK)],
                            q_s.at[b, pl.ds(0, part)],
                            q_full,
                        )

                def load_queries() -> None:
                    @pl.when(wg == 2)
                    def _() -> None:
                        plgpu.barrier_wait(q_empty)
                        _each_part(heads, block, copy)

                (_gather_in_interpreter if interpret else _gather)(row, count, locate, tile, load_queries)

            # Every arrival is waited for.
            pl.when(wg == 2)(lambda: plgpu.barrier_wait(q_empty))
            for b in range(STAGES):
                plgpu.barrier_wait(k_empty.at[b])

        def _gather(row: jax.Array, count: jax.Array, locate: Any, tile: jax.Array, load_queries: Any) -> None:
            def fetch(i: jax.Array) -> jax.Array:
                group, chunk, limit = locate(i)
                return gatherer.slots(slots_g, group, 2 * chunk + tile, row, jnp.where(i < count, limit, 0))

            def find(i: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
                return gatherer.find(caches_g, locate(i)[0], slots)

            def load(i: jax.Array, units: jax.Array, at: int) -> jax.Array:
                return gatherer.load(caches_g, locate(i)[0], units, ORDER[at])

            def chunk(i: jax.Array, carry: Any) -> Any:
                slots, units, scales, *data = carry
                next_units, next_scales = find(i + 1, slots)
                slots = fetch(i + 2)
                for at, b in enumerate(ORDER):
                    if at + ahead < BLOCKS:
                        data.append(load(i, units, at + ahead))
                    else:
                        data.append(load(i + 1, next_units, at + ahead - BLOCKS))
                    if at % 2 == 0:
                        plgpu.barrier_wait(k_empty.at[at // 2])
                    if at == 0:
                        gatherer.mask(f_s, tile, units)
                    gatherer.store(k_s, _TRANSFORMS, tile, b, data.pop(0), scales)
                    if at % 2:
                        plgpu.barrier_arrive(k_full.at[tile * STAGES + at // 2])
                return slots, next_units, next_scales, *data

            start = jnp.int32(0)
            units, scales = find(start, fetch(start))
            data = [load(start, units, at) for at in range(ahead)]
            slots = fetch(start + 1)
            load_queries()
            lax.fori_loop(0, count, chunk, (slots, units, scales, *data))

        def _gather_in_interpreter(
            row: jax.Array, count: jax.Array, locate: Any, tile: jax.Array, load_queries: Any
        ) -> None:
            load_queries()

            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                group, chunk, limit = locate(i)
                keys, live = [], []
                for g in range(n):
                    entry = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
                    slot = slots_g[g][row, ...][jnp.minimum(entry, widths[g] - 1)]
                    ok = (entry < limit) & (slot >= 0) & (slot < layouts[g].num_slots)
                    live.append(ok)
                    keys.append(gather(caches_g[g][...], layouts[g], jnp.where(ok, slot, -1)))
                key, ok = keys[0], live[0]
                if n > 1:
                    key, ok = jnp.where(group > 0, keys[1], key), jnp.where(group > 0, live[1], ok)
                key = lax.dynamic_index_in_dim(key.reshape(2, TILE, BLOCKS, BLOCK), tile, keepdims=False)
                ok = lax.dynamic_index_in_dim(ok.reshape(2, TILE), tile, keepdims=False)
                for stage in range(STAGES):
                    plgpu.barrier_wait(k_empty.at[stage])
                    if stage == 0:
                        f_s[tile] = jnp.where(ok, 0.0, -jnp.inf)
                    for b in (stage, stage + STAGES):
                        k_s[tile, b] = key[:, b]
                    plgpu.barrier_arrive(k_full.at[tile * STAGES + stage])

        lax.cond(wg < 2, consume, produce)

    out_type = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)
    lse_type = jax.ShapeDtypeStruct((rows, head_blocks, HEADS), jnp.float32)
    part_types = (
        jax.ShapeDtypeStruct((items * PIECES, HEADS, PIECE), jnp.float32),
        jax.ShapeDtypeStruct((items, HEADS), jnp.float32),
        jax.ShapeDtypeStruct((items, 2, HEADS), jnp.float32),
    )
    tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_TRANSFORMS)
    options = {"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}
    results = plgpu.kernel(
        kernel,
        out_type=part_types if split else (out_type, lse_type),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="wg",
        compiler_params=_PARAMS,
        scratch_types=[
            tile((BLOCKS, HEADS, BLOCK)),
            tile((2, BLOCKS, TILE, BLOCK)),
            tile((2, HEADS, TILE)),
            plgpu.SMEM((8, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=BLOCKS),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1, num_barriers=2 * STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2),
        ],
        **options,
    )(q, sink, *caches, *slots, *lengths)
    if split:
        sums, tops, totals = results
        results = _combine(sums, tops, totals, sink, out_type, lse_type, chunks, options)
    out, lse = results
    return out, lse.reshape(rows, -1)[:, :heads]


def _combine(
    sums: jax.Array,
    tops: jax.Array,
    totals: jax.Array,
    sink: jax.Array,
    out_type: jax.ShapeDtypeStruct,
    lse_type: jax.ShapeDtypeStruct,
    chunks: int,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Adds the chunks of a row, in order, relative to the largest of their maxima."""
    rows, heads, _ = out_type.shape
    head_blocks = lse_type.shape[1]

    def kernel(sums_g: Any, tops_g: Any, totals_g: Any, sink_g: Any, out_g: Any, lse_g: Any, o_s: Any, f_s: Any):
        cell, piece = lax.axis_index("cell"), lax.axis_index("piece")
        first = cell * chunks

        def load(c: int) -> jax.Array:
            index = (first + c) * PIECES + piece
            return sums_g[index] if options else load_piece(sums_g, index)

        depth = 4  # pieces on their way at once
        pieces = [load(c) for c in range(min(depth, chunks))]
        maxima = [_row(tops_g.at[first + c]) for c in range(chunks)]
        top = functools.reduce(jnp.maximum, maxima, _full(LOWEST, (HEADS,), _ROW))
        acc, total = _full(0.0, (HEADS, PIECE), _W), [_full(0.0, (HEADS,), _ROW)] * 2
        for c in range(chunks):
            gain = jnp.exp2(maxima[c] - top)
            total = [total[i] + _row(totals_g.at[first + c, i]) * gain for i in range(2)]
            if c + depth < chunks:
                pieces.append(load(c + depth))
            acc = acc + pieces[c] * _across(gain, acc)
        block = cell % head_blocks
        factor, lse = _finish(top, total, _row(sink_g.at[block]))
        o_s[...] = (acc * _across(factor, acc)).astype(jnp.bfloat16)
        f_s[...] = lse
        plgpu.commit_smem()

        def copy(part: int) -> None:
            plgpu.copy_smem_to_gmem(
                o_s.at[pl.ds(0, part)],
                out_g.at[cell // head_blocks, pl.ds(block * HEADS, part), pl.ds(piece * PIECE, PIECE)],
            )

        _each_part(heads, block, copy)
        pl.when(piece == 0)(lambda: plgpu.copy_smem_to_gmem(f_s, lse_g.at[cell // head_blocks, block]))
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=(out_type, lse_type),
        grid=(rows * head_blocks, PIECES),
        grid_names=("cell", "piece"),
        compiler_params=_PARAMS,
        scratch_types=[
            plgpu.SMEM(
                (HEADS, PIECE), jnp.bfloat16, transforms=(plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(64))
            ),
            plgpu.SMEM((HEADS,), jnp.float32),
        ],
        **options,
    )(sums, tops, totals, sink)
