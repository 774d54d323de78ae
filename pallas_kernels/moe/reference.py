"""Plain ``jax.numpy`` meaning of the experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.linear.reference import linear
from pallas_kernels.weights import Weight


def swiglu(
    x: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    limit: float,
    quantize: bool,
    weight: jax.Array | None = None,
) -> jax.Array:
    """``weight``: float32 ``[N]``, multiplied in before ``w2``."""
    gate = jnp.minimum(linear(x, w1, quantize, x.dtype).astype(jnp.float32), limit)
    up = jnp.clip(linear(x, w3, quantize, x.dtype).astype(jnp.float32), -limit, limit)
    inner = jax.nn.silu(gate) * up
    if weight is not None:
        inner = inner * weight[:, None]
    return linear(inner.astype(x.dtype), w2, quantize, x.dtype)


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    limit: float,
    quantize: bool,
) -> jax.Array:
    # Every expert over every row: a product over just an expert's rows would round by how many there are, and a row's
    # result may not depend on its neighbours. Fast implementations sort rows by expert and tile them.
    def add(total: jax.Array, expert: tuple[jax.Array, Weight, Weight, Weight]) -> tuple[jax.Array, None]:
        index, gate, up, down = expert
        chosen = ids == index
        weight = jnp.sum(jnp.where(chosen, weights.astype(jnp.float32), 0.0), axis=1)
        out = swiglu(x, gate, up, down, limit, quantize, weight)
        return total + jnp.where(chosen.any(1)[:, None], out.astype(jnp.float32), 0.0), None

    index = jnp.arange(w1.shape[0], dtype=ids.dtype)
    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (index, w1, w3, w2))[0]
