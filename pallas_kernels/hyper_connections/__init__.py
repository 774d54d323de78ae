"""Manifold-constrained hyper-connections: reading from and writing to the residual streams."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels._dispatch import dispatch, require_float, require_shape
from pallas_kernels.hyper_connections import reference

__all__ = ["head", "post", "pre"]


def pre(
    h: Float[Array, "N m D"],
    fn: Float[Array, "mix mD"],
    base: Float[Array, " mix"],
    scale: Float[Array, 3],
    *,
    rms_eps: float,
    hc_eps: float,
    iters: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "N D"], Float[Array, "N m"], Float[Array, "N m m"]]:
    """What a sub-layer reads from the streams, and how its result will be written back.

    Returns the weighted sum of the streams (dtype of ``h``), the write weights ``post`` and the mixing matrix
    ``comb[j, k]`` from stream j to stream k (float32; ``iters`` Sinkhorn iterations that end on columns).
    ``mix = (2 + m) m``. Source: model specification, section 2.2.

    Raises ``ValueError`` or ``TypeError`` for shapes or dtypes that do not fit.
    """
    op = "hyper_connections.pre"
    require_float(op, h=h, fn=fn, base=base, scale=scale)
    require_shape(op, "h", h, (None, None, None))
    _, m, width = h.shape
    require_shape(op, "fn", fn, ((2 + m) * m, m * width))
    require_shape(op, "base", base, ((2 + m) * m,))
    require_shape(op, "scale", scale, (3,))
    return dispatch(op, {"reference": reference.pre}, implementation, h, fn, base, scale, rms_eps, hc_eps, iters)


def post(
    y: Float[Array, "N D"],
    h: Float[Array, "N m D"],
    weights: Float[Array, "N m"],
    comb: Float[Array, "N m m"],
    *,
    implementation: str | None = None,
) -> Float[Array, "N m D"]:
    """The streams after a sub-layer: ``weights[k] y + sum_j comb[j, k] h[j]``, summed in float32, in the dtype of
    ``h``."""
    op = "hyper_connections.post"
    rows, m, width = h.shape
    require_float(op, y=y, h=h)
    require_shape(op, "y", y, (rows, width))
    require_shape(op, "weights", weights, (rows, m))
    require_shape(op, "comb", comb, (rows, m, m))
    return dispatch(op, {"reference": reference.post}, implementation, y, h, weights, comb)


def head(
    h: Float[Array, "N m D"],
    fn: Float[Array, "m mD"],
    base: Float[Array, " m"],
    scale: Float[Array, 1],
    *,
    rms_eps: float,
    hc_eps: float,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """The streams' weighted sum at the end of a stack (weights are not normalised), in the dtype of ``h``.

    Source: model specification, section 2.11.
    """
    op = "hyper_connections.head"
    require_float(op, h=h, fn=fn, base=base, scale=scale)
    _, m, width = h.shape
    require_shape(op, "fn", fn, (m, m * width))
    require_shape(op, "base", base, (m,))
    require_shape(op, "scale", scale, (1,))
    return dispatch(op, {"reference": reference.head}, implementation, h, fn, base, scale, rms_eps, hc_eps)
