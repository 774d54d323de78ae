"""Plain ``jax.numpy`` meaning of the paged row format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import _numerics as numerics
from pallas_kernels.pages import (
    DATA_BYTES,
    NOPE_DIM,
    ROPE_DIM,
    SCALE_BYTES,
    WORD_BYTES,
    DenseLayout,
    Layout,
    PageLayout,
)

_DATA_WORDS = DATA_BYTES // WORD_BYTES
_SCALE_WORDS = SCALE_BYTES // WORD_BYTES


def pack(
    latents: Float[Array, "N 512"], amax_floor: float = numerics.AMAX_FLOOR
) -> tuple[UInt8[Array, "N 576"], UInt8[Array, "N 8"]]:
    """Data and scale bytes of rows. ``amax_floor`` 0 gives an all-zero group the exponent 0 (code 127).

    The rotary channels are rounded to bfloat16, the others quantised from their bfloat16 values.
    """
    rows = latents.astype(jnp.bfloat16)
    nope = rows[:, :NOPE_DIM].astype(jnp.float32)
    if amax_floor:
        codes, exponent = numerics.act_quant(nope, numerics.KV_GROUP, amax_floor)
    else:
        grouped = nope.reshape(nope.shape[0], -1, numerics.KV_GROUP)
        empty = ~grouped.any(-1)  # without a floor zeros have no exponent of their own
        codes, exponent = numerics.act_quant(nope, numerics.KV_GROUP, 2.0**-100)
        exponent = jnp.where(empty, 0, exponent)
    exponent = jnp.clip(exponent + 127, 0, 254).astype(jnp.uint8)  # 255 would be NaN
    code_bytes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    rope_bytes = jax.lax.bitcast_convert_type(rows[:, NOPE_DIM:], jnp.uint8).reshape(rows.shape[0], -1)
    data = jnp.concatenate([code_bytes, rope_bytes], axis=-1)
    return data, jnp.pad(exponent, [(0, 0), (0, 1)])


def unpack(data: UInt8[Array, "*B 576"], scales: UInt8[Array, "*B 8"]) -> Float[Array, "*B 512"]:
    """bfloat16 rows of data and scale bytes. The pad byte is not read."""
    lead = data.shape[:-1]
    codes = jax.lax.bitcast_convert_type(data[..., :NOPE_DIM], jnp.float8_e4m3fn).astype(jnp.float32)
    scale = numerics.decode_e8m0(scales[..., : NOPE_DIM // numerics.KV_GROUP])
    nope = codes.reshape(*lead, -1, numerics.KV_GROUP) * scale[..., None]
    rope = jax.lax.bitcast_convert_type(data[..., NOPE_DIM:].reshape(*lead, ROPE_DIM, 2), jnp.bfloat16)
    return jnp.concatenate([nope.reshape(*lead, NOPE_DIM).astype(jnp.bfloat16), rope], axis=-1)


def _words(data: UInt8[Array, "*B bytes"]) -> Int[Array, "*B words"]:
    return jax.lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, WORD_BYTES), jnp.int32)


def _bytes(words: Int[Array, "*B words"]) -> UInt8[Array, "*B bytes"]:
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)


def _word_columns(layout: PageLayout, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Columns (int32 words within a page) of each row's data and scales."""
    base = layout.base_offset // WORD_BYTES
    data = base + row[..., None] * _DATA_WORDS + jnp.arange(_DATA_WORDS, dtype=jnp.int32)
    footer = base + layout.page_size * _DATA_WORDS
    return data, footer + row[..., None] * _SCALE_WORDS + jnp.arange(_SCALE_WORDS, dtype=jnp.int32)


def write(cache: jax.Array, layout: Layout, slots: jax.Array, latents: jax.Array, quantize: bool) -> jax.Array:
    # A negative index would wrap to the end, so padding goes past it, where mode="drop" ignores it.
    slots = jnp.where(slots >= 0, slots, layout.num_slots)
    if isinstance(layout, DenseLayout):
        if quantize:
            nope = numerics.fake_quant_fp8(latents[:, :-ROPE_DIM], numerics.KV_GROUP)
            latents = jnp.concatenate([nope, latents[:, -ROPE_DIM:]], axis=-1)
        return cache.at[slots].set(latents.astype(layout.dtype), mode="drop")
    data, scales = pack(latents)
    page, row = slots // layout.page_size, slots % layout.page_size
    data_columns, scale_columns = _word_columns(layout, row)
    columns = jnp.concatenate([data_columns, scale_columns], axis=-1)
    words = jnp.concatenate([_words(data), _words(scales)], axis=-1)
    return cache.at[page[:, None], columns].set(words, mode="drop")


def gather(cache: jax.Array, layout: Layout, slots: jax.Array) -> jax.Array:
    live = slots >= 0
    safe = jnp.where(live, slots, 0)
    if isinstance(layout, DenseLayout):
        rows = cache[safe]
    else:
        page, row = safe // layout.page_size, safe % layout.page_size
        data_columns, scale_columns = _word_columns(layout, row)
        rows = unpack(_bytes(cache[page[..., None], data_columns]), _bytes(cache[page[..., None], scale_columns]))
    return jnp.where(live[..., None], rows, jnp.zeros((), rows.dtype))
