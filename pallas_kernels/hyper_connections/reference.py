"""Plain ``jax.numpy`` meaning of the hyper-connections. Everything is float32 between the two casts.

Coefficients are computed with the rows along the last axis: sums over the few streams are then plain additions, in one
order for any number of rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _numerics as numerics


def mixes(h: jax.Array, fn: jax.Array, rms_eps: float) -> jax.Array:
    """``(flat(h) . fn) * rsqrt(mean(flat(h)^2) + eps)``: float32 ``[mix, N]``."""
    flat = h.astype(jnp.float32).reshape(h.shape[0], -1)
    mean = numerics.tree_sum(flat * flat, 1) / flat.shape[1]
    product = numerics.product(flat, fn.astype(jnp.float32))
    return (product * jax.lax.rsqrt(mean + rms_eps)[:, None]).T


def split_mixes(
    mix: jax.Array, base: jax.Array, scale: jax.Array, m: int, hc_eps: float, iters: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Read weights ``[m, N]``, write weights ``[m, N]`` and the mixing matrix ``[m, m, N]`` of ``mix`` ``[mix, N]``."""
    base = base[:, None]
    read = jax.nn.sigmoid(mix[:m] * scale[0] + base[:m]) + hc_eps
    write = 2 * jax.nn.sigmoid(mix[m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (mix[2 * m :] * scale[2] + base[2 * m :]).reshape(m, m, -1)
    comb = jnp.exp(comb - numerics.tree_max(comb, 1)[:, None])
    comb = comb / numerics.tree_sum(comb, 1)[:, None] + hc_eps
    comb = comb / (numerics.tree_sum(comb, 0)[None] + hc_eps)

    def balance(_: int, comb: jax.Array) -> jax.Array:
        comb = comb / (numerics.tree_sum(comb, 1)[:, None] + hc_eps)
        return comb / (numerics.tree_sum(comb, 0)[None] + hc_eps)

    return read, write, jax.lax.fori_loop(0, iters - 1, balance, comb)


def pre(h, fn, base, scale, rms_eps: float, hc_eps: float, iters: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    read, write, comb = split_mixes(mixes(h, fn, rms_eps), base, scale, h.shape[1], hc_eps, iters)
    return _weighted(h, read.T), write.T, comb.transpose(2, 0, 1)


def _weighted(h: jax.Array, weights: jax.Array) -> jax.Array:
    # m is 4: a sum of products, not a matrix product.
    return numerics.tree_sum(h.astype(jnp.float32) * weights[..., None], 1).astype(h.dtype)


def post(y: jax.Array, h: jax.Array, weights: jax.Array, comb: jax.Array) -> jax.Array:
    mixed = numerics.tree_sum(comb[..., None] * h.astype(jnp.float32)[:, :, None, :], 1)
    return (weights[..., None] * y.astype(jnp.float32)[:, None, :] + mixed).astype(h.dtype)


def head(h: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, rms_eps: float, hc_eps: float) -> jax.Array:
    read = jax.nn.sigmoid(mixes(h, fn, rms_eps) * scale[0] + base[:, None]) + hc_eps
    return _weighted(h, read.T)
