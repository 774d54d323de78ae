"""The lightning indexer: preparing queries and keys, scoring entries, choosing the best."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import _numerics as numerics
from pallas_kernels._dispatch import dispatch, require_float, require_integer, require_shape
from pallas_kernels.indexer import reference
from pallas_kernels.pages import DenseLayout, check_cache

__all__ = ["prepare_key", "prepare_query", "select"]


def _prepare(x: jax.Array, positions: jax.Array, inv_freq: np.ndarray, quantize: bool) -> jax.Array:
    x = numerics.rope(x, positions, inv_freq)
    return numerics.fake_quant_fp4(numerics.hadamard(x)) if quantize else x


def prepare_query(
    q: Float[Array, "N I d"], positions: Int[Array, " N"], inv_freq: np.ndarray, *, quantize: bool
) -> Float[Array, "N I d"]:
    """Rotary position, then (``quantize``) Hadamard rotation and FP4 rounding in groups of 32.

    The Hadamard rotation cancels in the product of query and key, so both leave it out without quantisation.
    Source: model specification, section 2.7.
    """
    return _prepare(q, positions, inv_freq, quantize)


def prepare_key(
    keys: Float[Array, "M d"], positions: Int[Array, " M"], inv_freq: np.ndarray, *, quantize: bool
) -> Float[Array, "M d"]:
    """``prepare_query`` for keys; ``positions`` is the first token of each entry's window."""
    return _prepare(keys, positions, inv_freq, quantize)


def select(
    q: Float[Array, "N I d"],
    weights: Float[Array, "N I"],
    cache: jax.Array,
    layout: DenseLayout,
    page_table: Int[Array, "B P"],
    row_request: Int[Array, " N"],
    visible: Int[Array, " N"],
    top_k: int,
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, "N top_k"], Int[Array, " N"]]:
    """The ``top_k`` visible entries with the largest ``sum_h weights_h * relu(q_h . key)``, in float32.

    Entry i of request b lies in page ``page_table[b, i // page_size]``; a row sees the first ``visible[n]`` entries of
    its request. Returns entry indices, best first, -1 behind the last, and their number ``min(visible, top_k)``. Which
    of two equal scores comes first is the lower index. Source: model specification, section 2.7.

    Raises ``ValueError`` or ``TypeError`` for shapes or dtypes that do not fit.
    """
    op = "indexer.select"
    check_cache(op, "cache", cache, layout)
    require_float(op, q=q, weights=weights)
    require_integer(op, page_table=page_table, row_request=row_request, visible=visible)
    require_shape(op, "q", q, (None, None, layout.width))
    rows, heads, _ = q.shape
    require_shape(op, "weights", weights, (rows, heads))
    require_shape(op, "page_table", page_table, (None, None))
    require_shape(op, "row_request", row_request, (rows,))
    require_shape(op, "visible", visible, (rows,))
    if top_k < 1:
        raise ValueError(f"{op}: top_k must be positive, got {top_k}")
    return dispatch(
        op,
        {"reference": reference.select},
        implementation,
        q,
        weights,
        cache,
        layout,
        page_table,
        row_request,
        visible,
        top_k,
    )
