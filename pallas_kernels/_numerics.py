"""Number formats and small per-row functions that operations share. Plain ``jax.numpy``; kernels
restate what they fuse.

Source throughout: model specification, sections 2.0 (quantisers), 2.3 (norm), 2.4 (rotary), 2.7 (Hadamard), 3.2 and
3.3 (stored formats).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

E4M3_MAX = 448.0
E2M1_MAX = 6.0
ACT_GROUP = 128
KV_GROUP = 64
FP4_GROUP = 32
AMAX_FLOOR = 1e-4
HIGHEST = jax.lax.Precision.HIGHEST
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def power_of_two(exponent: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """``2 ** exponent`` in float32 for exponents -126 to 127, exactly (an ``exp2`` may be off by one unit)."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def ceil_pow2_exponent(x: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """``ceil(log2(x))`` of positive normal float32 numbers, exact on powers of two.

    Read from the bits: the exponent, plus one if any mantissa bit is set. A rounded ``log2`` can be off by one just at
    powers of two.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)


def _grouped(x: jax.Array, group: int) -> jax.Array:
    if x.shape[-1] % group:
        raise ValueError(f"the last axis must be a multiple of the group size {group}, got {x.shape[-1]}")
    return x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)


def act_quant(
    x: Float[Array, "*B K"], group: int, amax_floor: float = AMAX_FLOOR
) -> tuple[Float[Array, "*B K"], Int[Array, "*B G"]]:
    """FP8 E4M3 codes and the power-of-two exponent of each group's scale: ``x ~ codes * 2**exponent``.

    The scale is ``amax / 448`` rounded up to a power of two, with ``amax`` at least ``amax_floor``. Raises
    ``ValueError`` if the last axis is not a multiple of ``group``.
    """
    grouped = _grouped(x, group)
    amax = jnp.maximum(jnp.abs(grouped).max(-1), amax_floor)
    exponent = ceil_pow2_exponent(amax * np.float32(1 / E4M3_MAX))
    scaled = grouped * power_of_two(-exponent)[..., None]
    # E4M3 has no infinity: a cast of what is out of range gives NaN, so clamp before it.
    codes = jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return codes.reshape(x.shape), exponent


def fake_quant_fp8(x: Float[Array, "*B K"], group: int) -> Float[Array, "*B K"]:
    """``x`` rounded to the FP8 grid of ``act_quant``, in the dtype of ``x``."""
    codes, exponent = act_quant(x, group)
    values = codes.astype(jnp.float32).reshape(*exponent.shape, group) * power_of_two(exponent)[..., None]
    return values.reshape(x.shape).astype(x.dtype)


def round_e2m1(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """float32 numbers within +-6 rounded to the E2M1 grid, ties to the even code."""
    magnitude = jnp.abs(x)
    step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    return jnp.copysign(jnp.round(magnitude / step) * step, x)


def fake_quant_fp4(x: Float[Array, "*B K"], group: int = FP4_GROUP) -> Float[Array, "*B K"]:
    """``x`` rounded to E2M1 with one power-of-two scale per ``group``, in the dtype of ``x``."""
    grouped = _grouped(x, group)
    amax = jnp.maximum(jnp.abs(grouped).max(-1, keepdims=True), E2M1_MAX * 2.0**-126)
    exponent = ceil_pow2_exponent(amax * np.float32(1 / E2M1_MAX))
    scaled = jnp.clip(grouped * power_of_two(-exponent), -E2M1_MAX, E2M1_MAX)
    return (round_e2m1(scaled) * power_of_two(exponent)).reshape(x.shape).astype(x.dtype)


def decode_e8m0(codes: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """``2 ** (code - 127)`` in float32; code 255 is NaN.

    Bits are placed, never cast: a cast would read code 127 as the number 127.
    """
    codes = codes.astype(jnp.int32)
    bits = jnp.where(codes == 0, 0x00400000, jnp.where(codes == 255, 0x7FC00000, codes << 23))
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def decode_block_fp8(
    codes: Float[Array, "*B O K"], scales: UInt8[Array, "*B o k"], dtype: Any, block: int = 128
) -> Float[Array, "*B O K"]:
    """A matrix stored as E4M3 with one E8M0 scale per ``block`` x ``block`` square (cut at the edges)."""
    rows, columns = codes.shape[-2:]
    scale = decode_e8m0(scales)
    scale = jnp.repeat(jnp.repeat(scale, block, axis=-2)[..., :rows, :], block, axis=-1)[..., :columns]
    return (codes.astype(jnp.float32) * scale).astype(dtype)


def decode_mxfp4(
    packed: UInt8[Array, "*B O half"], scales: UInt8[Array, "*B O k"], dtype: Any
) -> Float[Array, "*B O K"]:
    """A matrix stored as MXFP4: byte c holds columns 2c (low nibble) and 2c+1 (high), one E8M0 scale per row and 32
    columns."""
    nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1).astype(jnp.int32)
    values = jnp.asarray(_E2M1_VALUES)[nibbles & 7]
    values = jnp.where(nibbles & 8, -values, values)
    grouped = values.reshape(*values.shape[:-1], -1, FP4_GROUP) * decode_e8m0(scales)[..., None]
    return grouped.reshape(values.shape).astype(dtype)


def hadamard(x: Float[Array, "*B n"]) -> Float[Array, "*B n"]:
    """Normalised Walsh-Hadamard transform of the last axis (a power of two), Sylvester order, in the dtype of ``x``."""
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, got {n}")
    y = x.astype(jnp.float32)
    for stage in range(n.bit_length() - 1):
        pairs = y.reshape(*x.shape[:-1], -1, 2, 1 << stage)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
    return (y * np.float32(1 / math.sqrt(n))).astype(x.dtype)


def tree_reduce(x: jax.Array, axis: int, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Reduces an axis by halving it: elementwise steps in an order that depends on the axis' length alone.

    A compiler chooses how to emit a reduction, and what is fused with it, by the whole array's shape, so a row may be
    rounded differently when there are more rows.
    """
    size = x.shape[axis]
    while size > 1 and size % 2 == 0:
        size //= 2
        low, high = (jax.lax.slice_in_dim(x, start, start + size, axis=axis) for start in (0, size))
        x = combine(low, high)
    total = jax.lax.index_in_dim(x, 0, axis, keepdims=False)
    for i in range(1, size):
        total = combine(total, jax.lax.index_in_dim(x, i, axis, keepdims=False))
    return total


def tree_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum over an axis whose rounding does not depend on other axes: see ``tree_reduce``."""
    return tree_reduce(x, axis, jnp.add)


def tree_max(x: jax.Array, axis: int) -> jax.Array:
    """Maximum over an axis. It is exact in any order, but what is fused with it is not: see ``tree_reduce``."""
    return tree_reduce(x, axis, jnp.maximum)


def rms_norm(x: Float[Array, "*B K"], weight: Float[Array, " K"] | None, eps: float) -> Float[Array, "*B K"]:
    """``x * rsqrt(mean(x^2) + eps) * weight`` in float32, rounded once to the dtype of ``x``."""
    y = x.astype(jnp.float32)
    mean = tree_sum(y * y, y.ndim - 1) / y.shape[-1]
    y = y * jax.lax.rsqrt(mean + eps)[..., None]
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    return y.astype(x.dtype)


def rope(
    x: Float[Array, "N *H d"], positions: Int[Array, " N"], inv_freq: np.ndarray, inverse: bool = False
) -> Float[Array, "N *H d"]:
    """Rotates interleaved pairs of the last ``2 * len(inv_freq)`` channels by ``position * inv_freq``.

    Angles, sines and products are float32; other channels pass unchanged. ``inverse`` turns back.
    """
    width = 2 * len(inv_freq)
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), angle.shape[1])
    cos, sin = jnp.cos(angle), jnp.sin(angle) * (-1.0 if inverse else 1.0)
    keep, turn = x[..., :-width], x[..., -width:].astype(jnp.float32)
    pairs = turn.reshape(*turn.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turn.shape)
    return jnp.concatenate([keep, turned.astype(x.dtype)], axis=-1)


def map_row_tiles(function: Callable[..., Any], tile: int, *arrays: Any) -> Any:
    """``function`` over tiles of exactly ``tile`` rows of ``arrays`` (padded with zeros), one tile after the other.

    The tile's size is all that a compiler sees, so a row's bits cannot depend on how many rows there are; and the
    memory for intermediates is that of one tile.
    """
    rows = arrays[0].shape[0]
    tiles = -(-rows // tile)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, tiles * tile - rows)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(tiles, tile, *x.shape[1:])

    out = jax.lax.map(lambda args: function(*args), tuple(split(x) for x in arrays))
    return jax.tree.map(lambda y: y.reshape(tiles * tile, *y.shape[2:])[:rows], out)


def product(x: Float[Array, "N K"], matrix: Float[Array, "O K"]) -> Float[Array, "N O"]:
    """float32 ``x @ matrix.T``.

    On a CPU a row's bits do not depend on the number of rows: operands are widened to float32 first (exactly), because
    bfloat16 products of few rows run in another routine whose sums round differently; and for the same reason a single
    row or column is padded to two. GPU libraries promise no such thing.
    """
    rows, columns = (jnp.pad(a, [(0, 1), (0, 0)]) if a.shape[0] == 1 else a for a in (x, matrix))
    y = jax.lax.platform_dependent(rows, columns, cpu=_product_float32, default=_product)
    return y[: x.shape[0], : matrix.shape[0]]


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    contract_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, matrix, contract_last, precision=HIGHEST, preferred_element_type=jnp.float32)


def _product_float32(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return _product(x.astype(jnp.float32), matrix.astype(jnp.float32))
