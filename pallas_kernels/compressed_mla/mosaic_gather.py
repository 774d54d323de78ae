"""Thread-level code of the sparse MLA kernel: gathering and dequantising packed rows, and partial sums in registers.

Pallas on Hopper has no gather whose addresses differ per thread; these functions write it in MLIR inside
``inline_mgpu``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as mosaic_gpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.pages import DATA_BYTES, SCALE_BYTES, PageLayout

plgpu: Any = mosaic_gpu  # its annotations fit neither decorators with arguments nor names it re-exports

TILE = 64  # keys of one gathering warpgroup
BLOCK = 64  # channels of one column block: one scale of the stored format
WIDTH = 512
HEADS = 64  # rows of a wgmma
BLOCKS = WIDTH // BLOCK
# Columns of a piece of a partial sum in memory.
PIECE = 32


def _strided(words: int, vec: int) -> Any:
    return plgpu.Layout.WG_STRIDED((words,), vec_size=vec)


class Lane:
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


def fence() -> None:
    """Orders what other threads wrote to shared memory before this thread's tensor-core reads.

    The reader fences, not the writer: the compiler adds a memory barrier that would wait for the writer's prefetches.
    """

    @plgpu.inline_mgpu(return_type=())
    def code(_: Any) -> tuple[()]:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.proxy.async.shared::cta;", "", has_side_effects=True)
        return ()

    code()


def opaque_zero() -> jax.Array:
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
class Gather:
    """What one thread of the gathering warpgroup does, as Pallas functions around MLIR code."""

    layouts: tuple[PageLayout, ...]
    widths: tuple[int, ...]

    def _pick(self, group: Any, values: Sequence[Any]) -> Any:
        t = Lane()
        return values[0] if len(values) == 1 else arith.select(t.ge(group, t.c(1)), values[1], values[0])

    def slots(self, lists: Sequence[Any], group: Any, tile: Any, row: Any, limit: Any) -> jax.Array:
        """Slots of this thread's keys of a tile of a group's list; -1 from ``limit`` on."""

        @plgpu.inline_mgpu(
            arg_types=((plgpu.RefType(),) * len(lists), *_scalars(4)),
            return_type=plgpu.ShapeDtypeStruct((_KEYS * 128,), jnp.int32, layout=_strided(_KEYS * 128, 1)),
        )
        def code(_: Any, lists: Any, group: Any, tile: Any, row: Any, limit: Any) -> Any:
            t = Lane()
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
            t = Lane()
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
            t = Lane()
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
            t = Lane()
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
            t = Lane()
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


def _scale_pair(t: Lane, word: Any, byte: int) -> Any:
    """Twice the bfloat16 2**(code - 127 + 120): the missing 2**120 of a code whose bits were only moved.

    A code above 134 would need an exponent that bfloat16 has not and saturates.
    """
    code = arith.andi(arith.shrui(word, t.c(8 * byte)), t.c(255))
    exponent = arith.minsi(arith.addi(code, t.c(120)), t.c(254))
    return arith.muli(exponent, t.c(0x00800080))


def _dequantise(t: Lane, word: Any, scale: Any) -> list[Any]:
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


def _address(t: Lane, layout: PageLayout, slot: Any) -> tuple[Any, Any]:
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


def _piece(ref: Any, index: Any) -> Any:
    """Global address of this thread's first 16 bytes of a piece."""
    t = Lane()
    at = arith.addi(arith.muli(t.scalar(index), t.c(HEADS * PIECE * 4)), arith.muli(t.thread, t.c(16)))
    return t, arith.addi(t.pointer(ref), t.wide(at))


def store_pieces(ref: Any, index: Any, x: jax.Array) -> None:
    """Writes a float32 accumulator ``[64, 64]`` as pieces ``index`` and ``index + 1`` in the order of its registers.

    So every thread of ``load_piece`` reads what the same thread wrote, 16 bytes at a time.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *_scalars(1), plgpu.Layout.WGMMA), return_type=())
    def code(_: Any, ref: Any, index: Any, x: Any) -> tuple[()]:
        t, at = _piece(ref, index)
        registers = list(x.registers.flat)
        for i in range(0, len(registers), 2):
            values = [llvm.extractelement(r, t.c(k)) for r in registers[i : i + 2] for k in range(2)]
            t.asm(f"st.global.v4.f32 [$0+{i // 2 * 128 * 16}], {{$1, $2, $3, $4}};", [at, *values], "l,f,f,f,f")
        return ()

    code(ref, index, x)


def load_piece(ref: Any, index: Any) -> jax.Array:
    """Reads a piece: float32 ``[64, PIECE]`` in the accumulator layout."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *_scalars(1)),
        return_type=plgpu.ShapeDtypeStruct((HEADS, PIECE), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def code(_: Any, ref: Any, index: Any) -> Any:
        t, at = _piece(ref, index)
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        kind = llvm.StructType.get_literal([f32] * 4)
        registers = []
        for i in range(PIECE // 8):
            text = f"ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4+{i * 128 * 16}];"
            out = llvm.inline_asm(kind, [at], text, "=f,=f,=f,=f,l", has_side_effects=True)
            for r in range(2):
                vector = llvm.mlir_undef(pair)
                for k in range(2):
                    vector = llvm.insertelement(vector, llvm.extractvalue(f32, out, [2 * r + k]), t.c(k))
                registers.append(vector)
        array = np.array(registers, dtype=object).reshape(mgpu.WGMMA_LAYOUT.registers_shape((HEADS, PIECE)))
        return mgpu.FragmentedArray(_registers=array, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return code(ref, index)
