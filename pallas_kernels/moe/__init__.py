"""Routed and shared experts with clamped SwiGLU."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels._dispatch import dispatch, require_float, require_integer, require_shape
from pallas_kernels.moe import reference
from pallas_kernels.weights import Weight, check_weight

__all__ = ["experts", "swiglu"]


def experts(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    swiglu_limit: float,
    quantize_activations: bool,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """float32 sum over each row's experts of ``w2 (weight * silu(min(w1 x, limit)) * clip(w3 x, -limit, limit))``.

    ``w1`` (gate) and ``w3`` (up) are ``[E, I, D]``, ``w2`` (down) ``[E, D, I]``. The routing weight multiplies before
    ``w2``, which matters under quantised activations; each expert's output is rounded to the dtype of ``x`` before the
    sum. A row's ids must be distinct. Source: model specification, section 2.10.

    Raises ``ValueError`` or ``TypeError`` for shapes or dtypes that do not fit.
    """
    op = "moe.experts"
    require_float(op, x=x, weights=weights)
    require_integer(op, ids=ids)
    rows, width = x.shape
    require_shape(op, "ids", ids, (rows, None))
    require_shape(op, "weights", weights, tuple(ids.shape))
    _check_matrices(op, width, w1, w3, w2, 3)
    return dispatch(
        op,
        {"reference": reference.experts},
        implementation,
        x,
        ids,
        weights,
        w1,
        w3,
        w2,
        swiglu_limit,
        quantize_activations,
    )


def swiglu(
    x: Float[Array, "N D"],
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    swiglu_limit: float,
    quantize_activations: bool,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """One expert for every row (the shared one), without a routing weight: ``[N, D]`` in the dtype of ``x``."""
    op = "moe.swiglu"
    require_float(op, x=x)
    _check_matrices(op, x.shape[1], w1, w3, w2, 2)
    return dispatch(
        op, {"reference": reference.swiglu}, implementation, x, w1, w3, w2, swiglu_limit, quantize_activations
    )


def _check_matrices(op: str, width: int, w1: Weight, w3: Weight, w2: Weight, ndim: int) -> None:
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        check_weight(op, name, weight, ndim)
    *batch, inner, _ = w1.shape
    for name, weight, shape in (("w1", w1, (inner, width)), ("w3", w3, (inner, width)), ("w2", w2, (width, inner))):
        if weight.shape != (*batch, *shape):
            raise ValueError(f"{op}: {name} must have shape {[*batch, *shape]}, got {list(weight.shape)}")
