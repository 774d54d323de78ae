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
    rows = numerics.at_least_two_rows(x)
    y = jax.lax.dot_general(
        rows,
        weight.dequantize(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=numerics.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y[: x.shape[0]].astype(out_dtype)


def grouped_linear(x: jax.Array, weight: Weight) -> jax.Array:
    groups = x.shape[1]
    matrix = weight.dequantize(x.dtype).reshape(groups, -1, x.shape[2])
    y = jnp.einsum(
        "ngk,gok->ngo",
        numerics.at_least_two_rows(x),
        matrix,
        precision=numerics.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y[: x.shape[0]].astype(x.dtype)
