"""Rows in and out of paged caches: quantise and scatter, gather and dequantise."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import _numerics as numerics
from pallas_kernels._dispatch import dispatch, require_float, require_integer, require_shape
from pallas_kernels.kv_pages import reference
from pallas_kernels.kv_pages.reference import pack, unpack
from pallas_kernels.pages import ROPE_DIM, Layout, PageLayout, check_cache

__all__ = ["gather", "pack", "unpack", "write"]


def write(
    cache: jax.Array,
    layout: Layout,
    slots: Int[Array, " N"],
    latents: Float[Array, "N d"],
    *,
    quantize: bool,
    implementation: str | None = None,
) -> jax.Array:
    """The cache with ``latents[n]`` at ``slots[n]``; rows with a negative slot write nothing. Slots must be distinct.

    ``PageLayout`` always packs (FP8 codes and scales for the first 448 channels, bfloat16 for the last 64) and needs
    ``quantize``. ``DenseLayout`` stores rows as they are, or with ``quantize`` rounded to the same FP8 grid in groups
    of 64 (all but the last 64 channels). Source: serving contracts, section 1.4; model specification, section 2.5.

    Raises ``ValueError`` for shapes that do not fit, ``TypeError`` for dtypes.
    """
    op = "kv_pages.write"
    check_cache(op, "cache", cache, layout)
    require_integer(op, slots=slots)
    require_float(op, latents=latents)
    require_shape(op, "latents", latents, (slots.shape[0], layout.width))
    if isinstance(layout, PageLayout) and not quantize:
        raise ValueError(f"{op}: a PageLayout holds quantised rows only: expected quantize=True")
    if quantize and (layout.width <= ROPE_DIM or (layout.width - ROPE_DIM) % numerics.KV_GROUP):
        raise ValueError(
            f"{op}: quantised rows need {ROPE_DIM} rotary channels and a multiple of {numerics.KV_GROUP} others, "
            f"got width {layout.width}"
        )
    return dispatch(op, {"reference": reference.write}, implementation, cache, layout, slots, latents, quantize)


def gather(
    cache: jax.Array, layout: Layout, slots: Int[Array, "*B"], *, implementation: str | None = None
) -> Float[Array, "*B d"]:
    """Rows at ``slots``, unpacked (bfloat16 from a ``PageLayout``, else the cache's dtype). Negative slots give zeros.

    Raises ``ValueError`` or ``TypeError`` for an array that is not the layout's.
    """
    op = "kv_pages.gather"
    check_cache(op, "cache", cache, layout)
    require_integer(op, slots=slots)
    return dispatch(op, {"reference": reference.gather}, implementation, cache, layout, slots)
