"""Linear layers with matrices in any stored format."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels._dispatch import dispatch, require_float
from pallas_kernels.linear import reference
from pallas_kernels.weights import Weight, check_weight

__all__ = ["grouped_linear", "linear"]


def linear(
    x: Float[Array, "N K"],
    weight: Weight,
    *,
    quantize_activations: bool,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "N O"]:
    """``x @ weight.T`` with float32 accumulation, in ``out_dtype`` (default: that of ``x``).

    ``quantize_activations`` first rounds ``x`` to FP8 with one power-of-two scale per row and 128 columns, as the
    checkpoint's quantised linears were trained (model specification, section 2.0). Wider of the two dtypes computes:
    float32 activations meet the matrix in float32.

    Raises ``ValueError`` or ``TypeError`` for shapes or dtypes that do not fit.
    """
    op = "linear"
    require_float(op, x=x)
    check_weight(op, "weight", weight, 2)
    if x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{op}: x must have shape [rows, {weight.shape[1]}], got {list(x.shape)}")
    if quantize_activations and x.shape[1] % 128:
        raise ValueError(f"{op}: quantised activations need a multiple of 128 columns, got {x.shape[1]}")
    return dispatch(
        op, {"reference": reference.linear}, implementation, x, weight, quantize_activations, out_dtype or x.dtype
    )


def grouped_linear(
    x: Float[Array, "N G K"], weight: Weight, *, implementation: str | None = None
) -> Float[Array, "N G O"]:
    """Each group of ``x`` by its own rows of ``weight`` ``[G * O, K]``; activations are not quantised.

    Source: model specification, section 2.9. Raises ``ValueError`` or ``TypeError`` for shapes or dtypes.
    """
    op = "grouped_linear"
    require_float(op, x=x)
    check_weight(op, "weight", weight, 2)
    if x.ndim != 3 or x.shape[2] != weight.shape[1] or weight.shape[0] % x.shape[1]:
        raise ValueError(
            f"{op}: x must have shape [rows, groups, {weight.shape[1]}] with a group count that divides "
            f"{weight.shape[0]}, got {list(x.shape)}"
        )
    return dispatch(op, {"reference": reference.grouped_linear}, implementation, x, weight)
