"""Plain ``jax.numpy`` meaning of the hyper-connections. Everything is float32 between the two casts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _numerics as numerics


def mixes(h: jax.Array, fn: jax.Array, rms_eps: float) -> jax.Array:
    """``(flat(h) . fn) * rsqrt(mean(flat(h)^2) + eps)``: float32 ``[N, mix]``."""
    flat = h.astype(jnp.float32).reshape(h.shape[0], -1)
    norm = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + rms_eps)
    rows = numerics.at_least_two_rows(flat)
    return jnp.einsum("nk,ok->no", rows, fn.astype(jnp.float32), precision=numerics.HIGHEST)[: h.shape[0]] * norm


def split_mixes(
    mix: jax.Array, base: jax.Array, scale: jax.Array, m: int, hc_eps: float, iters: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Read weights ``[N, m]``, write weights ``[N, m]`` and the mixing matrix ``[N, m, m]``."""
    read = jax.nn.sigmoid(mix[:, :m] * scale[0] + base[:m]) + hc_eps
    write = 2 * jax.nn.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(-1, m, m)
    comb = jax.nn.softmax(comb, axis=-1) + hc_eps
    comb = comb / (comb.sum(1, keepdims=True) + hc_eps)

    def balance(_: int, comb: jax.Array) -> jax.Array:
        comb = comb / (comb.sum(2, keepdims=True) + hc_eps)
        return comb / (comb.sum(1, keepdims=True) + hc_eps)

    return read, write, jax.lax.fori_loop(0, iters - 1, balance, comb)


def pre(h, fn, base, scale, rms_eps: float, hc_eps: float, iters: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    read, write, comb = split_mixes(mixes(h, fn, rms_eps), base, scale, h.shape[1], hc_eps, iters)
    return _weighted(h, read), write, comb


def _weighted(h: jax.Array, weights: jax.Array) -> jax.Array:
    # m is 4: a sum of products, not a matrix product.
    return jnp.sum(h.astype(jnp.float32) * weights[..., None], axis=1).astype(h.dtype)


def post(y: jax.Array, h: jax.Array, weights: jax.Array, comb: jax.Array) -> jax.Array:
    mixed = jnp.sum(comb[..., None] * h.astype(jnp.float32)[:, :, None, :], axis=1)
    return (weights[..., None] * y.astype(jnp.float32)[:, None, :] + mixed).astype(h.dtype)


def head(h: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, rms_eps: float, hc_eps: float) -> jax.Array:
    return _weighted(h, jax.nn.sigmoid(mixes(h, fn, rms_eps) * scale[0] + base) + hc_eps)
