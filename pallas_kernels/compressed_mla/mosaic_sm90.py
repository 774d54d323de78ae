"""Compressed sparse MLA on Hopper: a Mosaic GPU kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic_gpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.compressed_mla.reference import KeyGroup
from pallas_kernels.kv_pages.reference import gather
from pallas_kernels.pages import DATA_BYTES, SCALE_BYTES, PageLayout

plgpu: Any = mosaic_gpu  # its annotations fit neither decorators with arguments nor names it re-exports

CHUNK = 128  # keys whose weights share one maximum and one partial sum
TILE = 64  # keys of one MMA warpgroup
BLOCK = 64  # channels of one column block: one scale of the stored format
HEADS = 64  # rows of a wgmma
WIDTH = 512
BLOCKS = WIDTH // BLOCK
# Blocks come and go in pairs: the MMA warpgroups finish blocks s and s + 4 together.
STAGES = BLOCKS // 2
ORDER = tuple(b for stage in range(STAGES) for b in (stage, stage + STAGES))
LOG2E = math.log2(math.e)
# Adding this rounds a base-2 logit to a multiple of 2**-14: then subtracting an integer maximum is exact.
GRID = 768.0
LOWEST = -(2.0**30)

_W = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def _strided(words: int, vec: int) -> Any:
    return plgpu.Layout.WG_STRIDED((words,), vec_size=vec)


class _Lane:
    """Scalar code of one thread of the gathering warpgroup, in MLIR."""

    def __init__(self) -> None:
        self.i1 = ir.IntegerType.get_signless(1)
        self.i32 = ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.thread = arith.andi(mgpu.utils.thread_idx(), self.c(127))

    def c(self, value: int) -> Any:
        return arith.constant(self.i32, ir.IntegerAttr.get(self.i32, value))

    def c64(self, value: int) -> Any:
        return arith.constant(self.i64, ir.IntegerAttr.get(self.i64, value))

    def lt(self, a: Any, b: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.slt, a, b)

    def ge(self, a: Any, b: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.sge, a, b)

    def wide(self, a: Any) -> Any:
        return arith.extui(self.i64, a)

    def pointer(self, ref: Any) -> Any:
        return llvm.ptrtoint(self.i64, mgpu.utils.memref_ptr(ref))

    def shared(self, ref: Any) -> Any:
        """32-bit shared-memory address."""
        return llvm.ptrtoint(self.i32, mgpu.utils.memref_ptr(ref))

    def load(self, address: Any, words: int, live: Any, policy: str = "") -> list[Any]:
        """``words`` (1, 2 or 4) int32 at a global ``address``; zeros, and no access, where ``live`` is false."""
        vec = {1: "", 2: ".v2", 4: ".v4"}[words]
        outs = ", ".join(f"${i}" for i in range(words))
        outs = "{" + outs + "}" if words > 1 else outs
        zero = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
        pred = arith.extui(self.i32, live)
        asm = (
            f"{{ .reg .pred p; setp.ne.b32 p, ${words + 1}, 0; {zero} "
            f"@p ld.global.nc{policy}{vec}.b32 {outs}, [${words}]; }}"
        )
        kind = self.i32 if words == 1 else llvm.StructType.get_literal([self.i32] * words)
        out = llvm.inline_asm(kind, [address, pred], asm, ",".join(["=&r"] * words + ["l", "r"]), has_side_effects=True)
        return [out] if words == 1 else [llvm.extractvalue(self.i32, out, [i]) for i in range(words)]

    def scalar(self, x: Any) -> Any:
        """The value of a scalar operand."""
        return x.registers.item()

    def asm(self, text: str, args: Sequence[Any], constraints: str) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), list(args), text, constraints, has_side_effects=True)


def _fragment(values: Sequence[Any], vec: int) -> Any:
    """int32 registers of each thread as an array in the strided layout."""
    i32 = ir.IntegerType.get_signless(32)
    ty = ir.VectorType.get((vec,), i32)
    registers = []
    for start in range(0, len(values), vec):
        out = llvm.mlir_undef(ty)
        for k in range(vec):
            index = arith.constant(i32, ir.IntegerAttr.get(i32, k))
            out = llvm.insertelement(out, values[start + k], index)
        registers.append(out)
    layout = mgpu.WGStridedFragLayout((len(values) * 128,), vec)
    return mgpu.FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=True)


def _values(array: Any) -> list[Any]:
    i32 = ir.IntegerType.get_signless(32)
    out = []
    for register in array.registers.flat:
        for k in range(ir.VectorType(register.type).shape[0]):
            index = arith.constant(i32, ir.IntegerAttr.get(i32, k))
            out.append(llvm.extractelement(register, index))
    return out


# A thread of the gathering warpgroup reads quarter `thread % 4` of the keys `thread / 4 + 32 i`, i = 0, 1, of a tile.
_KEYS = 2


def _fence() -> None:
    """Orders what other threads wrote to shared memory before this thread's tensor-core reads.

    The reader fences, not the writer: the compiler adds a memory barrier that would wait for the writer's prefetches.
    """

    @plgpu.inline_mgpu(return_type=())
    def code(_: Any) -> tuple[()]:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async.shared::cta;", "", has_side_effects=True)
        return ()

    code()


def _opaque_zero() -> jax.Array:
    """0, in a way that the compiler cannot see.

    Addresses that contain it are computed where they are used. Otherwise those of every operand of every tensor-core
    instruction are taken out of the loop, and there are more of them than registers.
    """

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())))
    def code(_: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        zero = arith.constant(i32, ir.IntegerAttr.get(i32, 0))
        out = llvm.inline_asm(
            i32, [zero], "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(out, (), is_signed=True)

    return code()


def _scalars(count: int) -> tuple[Any, ...]:
    return (plgpu.Layout.WG_SPLAT(()),) * count


@dataclasses.dataclass(frozen=True)
class _Gather:
    """What one thread of the gathering warpgroup does, as Pallas functions around MLIR code."""

    layouts: tuple[PageLayout, ...]
    widths: tuple[int, ...]

    def _pick(self, group: Any, values: Sequence[Any]) -> Any:
        t = _Lane()
        return values[0] if len(values) == 1 else arith.select(t.ge(group, t.c(1)), values[1], values[0])

    def slots(self, lists: Sequence[Any], group: Any, tile: Any, row: Any, limit: Any) -> jax.Array:
        """Slots of this thread's keys of a tile of a group's list; -1 from ``limit`` on."""

        @plgpu.inline_mgpu(
            arg_types=((plgpu.RefType(),) * len(lists), *_scalars(4)),
            return_type=plgpu.ShapeDtypeStruct((_KEYS * 128,), jnp.int32, layout=_strided(_KEYS * 128, 1)),
        )
        def code(_: Any, lists: Any, group: Any, tile: Any, row: Any, limit: Any) -> Any:
            t = _Lane()
            group, tile, row, limit = map(t.scalar, (group, tile, row, limit))
            table = self._pick(group, [t.pointer(x) for x in lists])
            width = self._pick(group, [t.c(w) for w in self.widths])
            start = arith.addi(arith.muli(tile, t.c(TILE)), arith.shrui(t.thread, t.c(2)))
            out = []
            for i in range(_KEYS):
                entry = arith.addi(start, t.c(32 * i))
                inside = t.lt(entry, limit)
                at = t.wide(arith.muli(arith.addi(arith.muli(row, width), entry), t.c(4)))
                slot = t.load(arith.addi(table, at), 1, inside)[0]
                out.append(arith.select(inside, slot, t.c(-1)))
            return _fragment(out, 1)

        return code(tuple(lists), group, tile, row, limit)

    def find(self, caches: Sequence[Any], group: Any, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Places of rows (in 16-byte units; -1 for no key) and their scale words. Asks the L2 cache for the rows."""
        units_type = plgpu.ShapeDtypeStruct((_KEYS * 128,), jnp.int32, layout=_strided(_KEYS * 128, 1))
        words_type = plgpu.ShapeDtypeStruct((_KEYS * 256,), jnp.int32, layout=_strided(_KEYS * 256, 2))

        @plgpu.inline_mgpu(
            arg_types=((plgpu.RefType(),) * len(caches), *_scalars(1), _strided(_KEYS * 128, 1)),
            return_type=(units_type, words_type),
        )
        def code(_: Any, caches: Any, group: Any, slots: Any) -> Any:
            t = _Lane()
            group = t.scalar(group)
            cache = self._pick(group, [t.pointer(x) for x in caches])
            total = self._pick(group, [t.c(layout.num_slots) for layout in self.layouts])
            quarter = arith.andi(t.thread, t.c(3))
            first = arith.cmpi(arith.CmpIPredicate.eq, quarter, t.c(0))
            units, words = [], []
            for slot in _values(slots):
                live = arith.andi(t.ge(slot, t.c(0)), t.lt(slot, total))
                places = [_address(t, layout, slot) for layout in self.layouts]
                unit, scale = (self._pick(group, values) for values in zip(*places, strict=True))
                words += t.load(arith.addi(cache, arith.muli(t.wide(scale), t.c64(SCALE_BYTES))), 2, live)
                # Five lines hold any row: four threads ask for one each, the first for the fifth.
                line = arith.addi(
                    arith.addi(cache, arith.muli(t.wide(unit), t.c64(16))), t.wide(arith.muli(quarter, t.c(128)))
                )
                for ok, offset in ((live, 0), (arith.andi(live, first), DATA_BYTES - 1)):
                    t.asm(
                        f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0+{offset}]; }}",
                        [line, arith.extui(t.i32, ok)],
                        "l,r",
                    )
                units.append(arith.select(live, unit, t.c(-1)))
            return _fragment(units, 1), _fragment(words, 2)

        return code(tuple(caches), group, slots)

    def load(self, caches: Sequence[Any], group: Any, units: jax.Array, block: int) -> jax.Array:
        """Starts to read a column block: 16 bytes of each key, or 32 of the rotary channels."""
        parts = 2 if block == BLOCKS - 1 else 1
        words = _KEYS * parts * 4 * 128

        @plgpu.inline_mgpu(
            arg_types=((plgpu.RefType(),) * len(caches), *_scalars(1), _strided(_KEYS * 128, 1)),
            return_type=plgpu.ShapeDtypeStruct((words,), jnp.int32, layout=_strided(words, 4)),
        )
        def code(_: Any, caches: Any, group: Any, units: Any) -> Any:
            t = _Lane()
            cache = self._pick(t.scalar(group), [t.pointer(x) for x in caches])
            quarter = arith.andi(t.thread, t.c(3))
            shift = arith.addi(arith.muli(quarter, t.c(16 * parts)), t.c(BLOCK * block))
            cache = arith.addi(cache, t.wide(shift))
            out = []
            for unit in _values(units):
                at = arith.addi(cache, arith.muli(t.wide(unit), t.c64(16)))
                for part in range(parts):
                    out += t.load(arith.addi(at, t.c64(16 * part)), 4, t.ge(unit, t.c(0)))
            return _fragment(out, 4)

        return code(tuple(caches), group, units)

    def store(self, keys: Any, transforms: Any, tile: Any, block: int, data: jax.Array, scales: jax.Array) -> None:
        """Dequantises a column block to bfloat16 in the swizzled tiles that the tensor cores read."""
        rotary = block == BLOCKS - 1
        words = _KEYS * (2 if rotary else 1) * 4 * 128

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(transforms), *_scalars(1), _strided(words, 4), _strided(_KEYS * 256, 2)),
            return_type=(),
        )
        def code(_: Any, keys: Any, tile: Any, data: Any, scales: Any) -> tuple[()]:
            t = _Lane()
            start = arith.addi(
                arith.muli(t.scalar(tile), t.c(BLOCKS * TILE * BLOCK * 2)), t.c(block * TILE * BLOCK * 2)
            )
            quarter, line = arith.andi(t.thread, t.c(3)), arith.shrui(t.thread, t.c(2))
            base = arith.addi(t.shared(keys), arith.addi(arith.muli(line, t.c(BLOCK * 2)), start))
            swizzle = arith.andi(line, t.c(7))
            # Two 16-byte units of a 128-byte line: 2 * quarter and the next.
            places = []
            for unit in range(2):
                column = arith.xori(arith.addi(arith.muli(quarter, t.c(2)), t.c(unit)), swizzle)
                places.append(arith.addi(base, arith.muli(column, t.c(16))))
            data, scales = _values(data), _values(scales)
            for i in range(_KEYS):
                offset = i * 32 * 128
                if rotary:
                    halves = data[8 * i : 8 * i + 4], data[8 * i + 4 : 8 * i + 8]
                else:
                    scale = _scale_pair(t, scales[2 * i + block // 4], block % 4)
                    values = [x for word in data[4 * i : 4 * i + 4] for x in _dequantise(t, word, scale)]
                    halves = values[:4], values[4:]
                for place, half in zip(places, halves, strict=True):
                    t.asm(f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};", [place, *half], "r,r,r,r,r")
            return ()

        code(keys, tile, data, scales)

    def mask(self, bias: Any, tile: Any, units: jax.Array) -> None:
        """Writes what is added to a key's logit: 0, or minus infinity where there is no key."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *_scalars(1), _strided(_KEYS * 128, 1)), return_type=())
        def code(_: Any, bias: Any, tile: Any, units: Any) -> tuple[()]:
            t = _Lane()
            start = arith.muli(t.scalar(tile), t.c(TILE * 4))
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(t.thread, t.c(3)), t.c(0))
            line = arith.shrui(t.thread, t.c(2))
            place = arith.addi(t.shared(bias), arith.addi(arith.muli(line, t.c(4)), start))
            for i, unit in enumerate(_values(units)):
                value = arith.select(t.ge(unit, t.c(0)), t.c(0), t.c(-0x800000))
                t.asm(
                    f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.b32 [$0+{128 * i}], $1; }}",
                    [place, value, arith.extui(t.i32, first)],
                    "r,r,r",
                )
            return ()

        code(bias, tile, units)


def _scale_pair(t: _Lane, word: Any, byte: int) -> Any:
    """Twice the bfloat16 2**(code - 127 + 120): the missing 2**120 of a code whose bits were only moved.

    A code above 134 would need an exponent that bfloat16 has not and saturates.
    """
    code = arith.andi(arith.shrui(word, t.c(8 * byte)), t.c(255))
    exponent = arith.minsi(arith.addi(code, t.c(120)), t.c(254))
    return arith.muli(exponent, t.c(0x00800080))


def _dequantise(t: _Lane, word: Any, scale: Any) -> list[Any]:
    """Four E4M3 codes to four bfloat16: exponent and mantissa bits moved in place, then times the scale (exact)."""
    pair = (
        "prmt.b32 t, $2, 0, {selector}; shr.b32 u, t, 4; and.b32 u, u, 0x07f007f0; "
        "lop3.b32 u, t, 0x80008000, u, 0xea; mul.bf16x2 ${out}, u, $3; "
    )
    text = "{{ .reg .b32 t, u; " + pair.format(selector="0x1404", out=0) + pair.format(selector="0x3424", out=1) + "}}"
    text = text.replace("{{", "{").replace("}}", "}")
    out = llvm.inline_asm(
        llvm.StructType.get_literal([t.i32, t.i32]), [word, scale], text, "=&r,=&r,r,r", has_side_effects=False
    )
    return [llvm.extractvalue(t.i32, out, [i]) for i in range(2)]


def _address(t: _Lane, layout: PageLayout, slot: Any) -> tuple[Any, Any]:
    """16-byte unit of a row's data and 8-byte unit of its scales, from the start of the cache."""
    size = t.c(layout.page_size)
    page, row = arith.divui(slot, size), arith.remui(slot, size)
    data = arith.addi(
        arith.muli(page, t.c(layout.page_stride // 16)),
        arith.addi(arith.muli(row, t.c(DATA_BYTES // 16)), t.c(layout.base_offset // 16)),
    )
    footer = (layout.base_offset + layout.page_size * DATA_BYTES) // SCALE_BYTES
    scale = arith.addi(arith.muli(page, t.c(layout.page_stride // 8)), arith.addi(row, t.c(footer)))
    return data, scale


def _full(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _across(x: jax.Array, like: jax.Array) -> jax.Array:
    """A value per row over all columns."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def _round(x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _chunks(length: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    limit = jnp.clip(length, 0, width)
    return limit, (limit + (CHUNK - 1)) // CHUNK


def attend(
    q: jax.Array,
    groups: Sequence[KeyGroup],
    attn_sink: jax.Array,
    sm_scale: float,
    *,
    num_ctas: int = 132,
    regs: tuple[int, int] = (200, 56),
    ahead: int = 1,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    rows, heads, width = q.shape
    if q.dtype != jnp.bfloat16 or width != WIDTH:
        raise NotImplementedError(f"expected bfloat16 queries of width {WIDTH}, got {q.dtype} and {width}")
    if heads % 8 or (heads > HEADS and heads % HEADS):
        raise NotImplementedError(f"expected 8 to 64 heads in steps of 8, or a multiple of 64, got {heads}")
    if any(not isinstance(layout, PageLayout) for _, layout, _, _ in groups):
        raise NotImplementedError("expected packed caches (PageLayout)")
    groups = [group for group in groups if group[2].shape[1]]
    caches, layouts, slots, lengths = zip(*groups, strict=True)
    n = len(groups)
    slots = [x.astype(jnp.int32) for x in slots]
    lengths = [x.astype(jnp.int32) for x in lengths]
    widths = tuple(x.shape[1] for x in slots)
    head_blocks = -(-heads // HEADS)
    part = min(heads, HEADS)
    items = rows * head_blocks
    num_ctas = min(num_ctas, items)
    gatherer = _Gather(tuple(layouts), widths)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    logit_scale = sm_scale * LOG2E
    sink = jnp.pad(attn_sink.astype(jnp.float32) * LOG2E, (0, head_blocks * HEADS - heads)).reshape(head_blocks, HEADS)

    opaque_zero = (lambda: jnp.int32(0)) if interpret else _opaque_zero
    fence = (lambda: None) if interpret else _fence

    def kernel(*refs: Any) -> None:
        q_g, sink_g, *rest = refs
        caches_g, slots_g, lengths_g, rest = rest[:n], rest[n : 2 * n], rest[2 * n : 3 * n], rest[3 * n :]
        out_g, lse_g, q_s, k_s, p_s, f_s, q_full, q_empty, k_full, k_empty, meet, *a_s = rest
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")

        def plan(item: jax.Array) -> Any:
            row = item // head_blocks
            limits, counts = zip(*(_chunks(lengths_g[i][row], widths[i]) for i in range(n)), strict=True)
            first = counts[0]

            def locate(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                if n == 1:
                    return jnp.int32(0), i, limits[0]
                second = i >= first
                return (
                    second.astype(jnp.int32),
                    jnp.where(second, i - first, i),
                    jnp.where(second, limits[1], limits[0]),
                )

            # A row without keys has one chunk of nothing, so that every item goes the same way.
            return row, item % head_blocks, jnp.maximum(sum(counts[1:], first), 1), locate

        def consume() -> None:
            plgpu.set_max_registers(regs[0], action="increase")
            for b in range(4):
                for i in range(2):
                    plgpu.barrier_arrive(k_empty.at[i * STAGES + b])
            plgpu.barrier_arrive(q_empty)

            @pl.loop(cta, items, step=num_ctas)
            def _(item: jax.Array) -> None:
                row, block, count, _ = plan(item)
                plgpu.barrier_wait(q_full)

                def chunk(at: jax.Array, carry: Any) -> Any:
                    acc, top, total = carry

                    def scores(ref: Any) -> jax.Array:
                        for stage in range(STAGES):
                            z = opaque_zero()
                            plgpu.barrier_wait(k_full.at[wg * STAGES + stage + z])
                            fence()
                            for b in (stage, stage + STAGES):
                                plgpu.wgmma(ref, q_s.at[b + z], k_s.at[wg + z, b].transpose((1, 0)))
                        return ref[...]

                    s = pl.run_scoped(scores, plgpu.ACC((HEADS, TILE), jnp.float32))
                    bias = plgpu.load(f_s.at[wg], layout=_COLUMN, optimized=False)
                    bias = plgpu.layout_cast(lax.broadcast_in_dim(bias, s.shape, [1]), _W)
                    s = s * logit_scale + GRID + bias
                    own = jnp.maximum(_round(s.max(axis=1) - GRID), LOWEST)
                    p = jnp.exp2(s - _across(own + GRID, s))
                    p_s[wg] = p.astype(jnp.bfloat16)
                    f_s[2 + wg] = own
                    plgpu.barrier_arrive(meet)
                    plgpu.barrier_wait(meet)
                    fence()  # this warpgroup did not wait for the other tile itself
                    tops = [plgpu.load(f_s.at[2 + i], layout=_ROW, optimized=False) for i in range(2)]
                    new = jnp.maximum(top, jnp.maximum(*tops))
                    keep = jnp.exp2(top - new)
                    total = total * keep + p.sum(axis=1) * jnp.exp2(own - new)
                    for i in range(2):
                        w = plgpu.load(p_s.at[i], layout=_W)
                        w = w * _across(jnp.exp2(tops[i] - new).astype(jnp.bfloat16), w)
                        if interpret:  # the interpreter takes no operand from registers
                            a_s[0][wg] = w
                            w = a_s[0].at[wg]
                        out = []
                        for b in range(4):

                            def values(ref: Any, i: int = i, b: int = b, w: Any = w) -> jax.Array:
                                plgpu.wgmma(ref, w, k_s.at[i, (wg + opaque_zero()) * 4 + b])
                                return ref[...]

                            part_sum = pl.run_scoped(values, plgpu.ACC((HEADS, BLOCK), jnp.float32))
                            # The last chunk's second tile takes the output before it is free.
                            if i:
                                pl.when(at + 1 < count)(lambda b=b: plgpu.barrier_arrive(k_empty.at[STAGES + b]))
                            else:
                                plgpu.barrier_arrive(k_empty.at[b])
                            out.append((acc[b] if i else acc[b] * _across(keep, acc[b])) + part_sum)
                        acc = out
                    return tuple(acc), new, total

                zero = tuple(_full(0.0, (HEADS, BLOCK), _W) for _ in range(4))
                acc, top, total = lax.fori_loop(
                    0, count, chunk, (zero, _full(LOWEST, (HEADS,), _ROW), _full(0.0, (HEADS,), _ROW))
                )
                plgpu.barrier_arrive(q_empty)
                f_s[4 + wg] = total
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)
                sums = [plgpu.load(f_s.at[4 + i], layout=_ROW, optimized=False) for i in range(2)]
                sink_row = plgpu.load(sink_g.at[block], layout=_ROW, optimized=False)
                new = jnp.maximum(top, _round(sink_row))
                keep = jnp.exp2(top - new)
                whole = (sums[0] + sums[1]) * keep + jnp.exp2(sink_row - new)
                factor = jnp.where(whole > 0, keep / whole, 0.0)
                lse = jnp.where(whole > 0, (new + jnp.log2(whole)) / LOG2E, -jnp.inf)

                @pl.when(wg == 0)
                def _() -> None:
                    f_s[6] = lse
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(f_s.at[6], lse_g.at[row, block])

                for b in range(4):
                    k_s[1, wg * 4 + b] = (acc[b] * _across(factor, acc[b])).astype(jnp.bfloat16)
                plgpu.commit_smem()
                for b in range(4):
                    plgpu.copy_smem_to_gmem(
                        k_s.at[1, wg * 4 + b, pl.ds(0, part)],
                        out_g.at[row, pl.ds(block * HEADS, part), pl.ds((wg * 4 + b) * BLOCK, BLOCK)],
                    )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for b in range(4):
                    plgpu.barrier_arrive(k_empty.at[STAGES + b])

            plgpu.wait_smem_to_gmem(0)

        def produce() -> None:
            plgpu.set_max_registers(regs[1], action="decrease")
            tile = wg - 2

            @pl.loop(cta, items, step=num_ctas)
            def _(item: jax.Array) -> None:
                row, block, count, locate = plan(item)

                def load_queries() -> None:
                    @pl.when(wg == 2)
                    def _() -> None:
                        plgpu.barrier_wait(q_empty)
                        for b in range(BLOCKS):
                            plgpu.copy_gmem_to_smem(
                                q_g.at[row, pl.ds(block * HEADS, part), pl.ds(b * BLOCK, BLOCK)],
                                q_s.at[b, pl.ds(0, part)],
                                q_full,
                            )

                (_gather_in_interpreter if interpret else _gather)(row, count, locate, tile, load_queries)

            # Every arrival is waited for once.
            @pl.when(wg == 2)
            def _() -> None:
                plgpu.barrier_wait(q_empty)

            for b in range(STAGES):
                plgpu.barrier_wait(k_empty.at[tile * STAGES + b])

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
                        plgpu.barrier_wait(k_empty.at[tile * STAGES + at // 2])
                    if at == 0:
                        gatherer.mask(f_s, tile, units)
                    gatherer.store(k_s, transforms, tile, b, data.pop(0), scales)
                    if at % 2:
                        plgpu.barrier_arrive(k_full.at[tile * STAGES + at // 2])
                return slots, next_units, next_scales, *data

            zero = jnp.int32(0)
            units, scales = find(zero, fetch(zero))
            data = [load(zero, units, at) for at in range(ahead)]
            slots = fetch(zero + 1)
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
                    plgpu.barrier_wait(k_empty.at[tile * STAGES + stage])
                    if stage == 0:
                        f_s[tile] = jnp.where(ok, 0.0, -jnp.inf)
                    for b in (stage, stage + STAGES):
                        k_s[tile, b] = key[:, b]
                    plgpu.barrier_arrive(k_full.at[tile * STAGES + stage])

        lax.cond(wg < 2, consume, produce)

    out_types = (
        jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, head_blocks, HEADS), jnp.float32),
    )
    tile = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=transforms)
    out, lse = plgpu.kernel(
        kernel,
        out_type=out_types,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types=[
            tile((BLOCKS, HEADS, BLOCK)),
            tile((2, BLOCKS, TILE, BLOCK)),
            tile((2, HEADS, TILE)),
            plgpu.SMEM((8, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=BLOCKS),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1, num_barriers=2 * STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=2 * STAGES),
            plgpu.Barrier(num_arrivals=2),
            *([tile((2, HEADS, TILE))] if interpret else []),
        ],
        **({"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}),
    )(q, sink, *caches, *slots, *lengths)
    return out, lse.reshape(rows, -1)[:, :heads]
