"""Compressed sparse multi-query latent attention over two paged caches, with a sink."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels._dispatch import dispatch, require_float, require_integer, require_shape
from pallas_kernels.compressed_mla import reference
from pallas_kernels.pages import Layout, check_cache

__all__ = ["attend"]


def attend(
    q: Float[Array, "N H d"],
    window_cache: jax.Array,
    window_layout: Layout,
    window_slots: Int[Array, "N W"],
    window_lengths: Int[Array, " N"],
    *,
    indexed_cache: jax.Array | None = None,
    indexed_layout: Layout | None = None,
    indexed_slots: Int[Array, "N E"] | None = None,
    indexed_lengths: Int[Array, " N"] | None = None,
    attn_sink: Float[Array, " H"],
    sm_scale: float,
    return_lse: bool = False,
    implementation: str | None = None,
):
    """One softmax per head over listed rows of a window cache and, optionally, of an indexed cache.

    ``key_n`` is a whole cache row and serves as value too. With ``l_n = sm_scale * q . key_n``::

        o = sum_n exp(l_n) key_n / (sum_n exp(l_n) + exp(attn_sink))        lse = log of the denominator

    The first ``lengths`` entries of a row's slot list are live (negative slots among them are skipped); the order of
    keys does not matter. A row without any key gives zeros. Scores and sums are float32; the weights are rounded to
    the dtype of ``q`` before they meet the values. The sink is a logit: it is not scaled and has no value.
    Source: model specification, section 2.8.

    Args:
      q: rotated queries ``[N, H, d]``, float32 or bfloat16.
      window_cache, window_layout: the array of ``window_layout``, rows of width d.
      window_slots, window_lengths: integer ``[N, W]`` and ``[N]``.
      indexed_cache, indexed_layout, indexed_slots, indexed_lengths: the same for compressed entries; all or none.
      attn_sink: float32 ``[H]``.
      return_lse: also return float32 ``[N, H]``.

    Returns:
      ``[N, H, d]`` in the dtype of ``q`` (and the log-sum-exp).

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit, with the numbers.
      NotImplementedError: no implementation (or not the named one) takes the case.
    """
    op = "compressed_mla.attend"
    require_float(op, q=q, attn_sink=attn_sink)
    if q.ndim != 3:
        raise ValueError(f"{op}: q must have shape [rows, heads, width], got {list(q.shape)}")
    rows, heads, width = q.shape
    require_shape(op, "attn_sink", attn_sink, (heads,))
    indexed = (indexed_cache, indexed_layout, indexed_slots, indexed_lengths)
    if any(x is None for x in indexed) and any(x is not None for x in indexed):
        raise ValueError(f"{op}: indexed_cache, indexed_layout, indexed_slots and indexed_lengths go together")
    groups: list[Any] = [("window", window_cache, window_layout, window_slots, window_lengths)]
    if indexed_layout is not None:
        groups.append(("indexed", indexed_cache, indexed_layout, indexed_slots, indexed_lengths))
    for name, cache, layout, slots, lengths in groups:
        check_cache(op, f"{name}_cache", cache, layout)
        if layout.width != width:
            raise ValueError(f"{op}: {name}_cache must hold rows of width {width} as q, got {layout.width}")
        require_integer(op, **{f"{name}_slots": slots, f"{name}_lengths": lengths})
        require_shape(op, f"{name}_slots", slots, (rows, None))
        require_shape(op, f"{name}_lengths", lengths, (rows,))
    out, lse = dispatch(
        op,
        {"reference": reference.attend},
        implementation,
        q,
        [group[1:] for group in groups],
        attn_sink,
        sm_scale,
    )
    return (out, lse) if return_lse else out
