"""Plain ``jax.numpy`` meaning of the linear layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _numerics as numerics
from pallas_kernels.weights import Weight


def linear(x: jax.Array, weight: Weight, quantize_activations: bool, out_dtype: Any) -> jax.Array:
    if quantize_activations:
        # Codes times power-of-two scales are exact in bfloat16, so this is the block-scaled product up to the order of
        # its sums.
        x = numerics.fake_quant_fp8(x, numerics.ACT_GROUP)
    return _product(x, weight.dequantize(x.dtype)).astype(out_dtype)


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """float32 ``x @ matrix.T``."""
    y = jax.lax.dot_general(
        numerics.at_least_two_rows(x),
        matrix,
        (((1,), (1,)), ((), ())),
        precision=numerics.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y[: x.shape[0]]


def grouped_linear(x: jax.Array, weight: Weight) -> jax.Array:
    groups = x.shape[1]
    matrix = weight.dequantize(x.dtype).reshape(groups, -1, x.shape[2])

    def one(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, columns = operands
        return _product(rows, columns).astype(x.dtype)

    # Group by group: a batched product is another routine, whose sums depend on the number of rows.
    return jax.lax.map(one, (x.swapaxes(0, 1), matrix)).swapaxes(0, 1)
