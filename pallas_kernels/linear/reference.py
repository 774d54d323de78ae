"""Plain ``jax.numpy`` meaning of the linear layers."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import _numerics as numerics
from pallas_kernels.weights import Weight


def linear(x: jax.Array, weight: Weight, quantize_activations: bool, out_dtype: Any) -> jax.Array:
    if quantize_activations:
        # Codes times power-of-two scales are exact in bfloat16, so this is the block-scaled product up to the order of
        # its sums.
        x = numerics.fake_quant_fp8(x, numerics.ACT_GROUP)
    return numerics.product(x, weight.dequantize(x.dtype)).astype(out_dtype)


def grouped_linear(x: jax.Array, weight: Weight) -> jax.Array:
    groups = x.shape[1]
    matrix = weight.dequantize(x.dtype).reshape(groups, -1, x.shape[2])

    def one(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, columns = operands
        return numerics.product(rows, columns).astype(x.dtype)

    # Group by group: a batched product is another routine, whose sums depend on the number of rows.
    return jax.lax.map(one, (x.swapaxes(0, 1), matrix)).swapaxes(0, 1)
