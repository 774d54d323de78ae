"""Sampling on the device: the target law of a row, and draws that depend on the request alone.

Every draw is keyed by ``(request seed, absolute position of the token that it decides, stream)``. So a request's
random numbers do not depend on its slot, on the batch, on padding or on how many steps it took, and the three streams
(drafts, acceptance, residual and ordinary tokens) are independent of each other, which losslessness needs (DSpark
specification, section 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dspark_jax.sampling_params import SamplingParams

DRAFT, ACCEPT, RESIDUAL = 0, 1, 2


class RowSampling(NamedTuple):
    """Sampling parameters of R requests (a pytree). ``temperature`` 0 is greedy, ``top_k`` 0 keeps everything."""

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    seed: UInt32[Array, "R 2"]

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], seeds: Sequence[int], *, size: int) -> RowSampling:
        """Host arrays for ``size`` rows; rows behind ``params`` are greedy padding. ``seeds`` are 64-bit integers."""
        if not len(params) == len(seeds) <= size:
            raise ValueError(f"expected as many seeds as params and at most {size}, got {len(seeds)}, {len(params)}")
        table: dict[str, Any] = {
            "temperature": np.zeros(size, np.float32),
            "top_k": np.zeros(size, np.int32),
            "top_p": np.ones(size, np.float32),
            "min_p": np.zeros(size, np.float32),
            "seed": np.zeros((size, 2), np.uint32),
        }
        for i, (p, seed) in enumerate(zip(params, seeds, strict=True)):
            table["temperature"][i] = 0 if p.greedy else p.temperature
            table["top_k"][i] = max(p.top_k, 0)
            table["top_p"][i], table["min_p"][i] = p.top_p, p.min_p
            table["seed"][i] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
        return cls(**table)

    def repeat(self, times: int) -> RowSampling:
        """Each request's parameters for ``times`` consecutive rows."""
        return RowSampling(*(jnp.repeat(x, times, axis=0) for x in self))


def keys(sampling: RowSampling, positions: Int[Array, " R"], stream: int) -> jax.Array:
    """One random key per row for the draw that decides the token at ``positions``."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, position), stream)

    return jax.vmap(one)(sampling.seed, positions)


def scale(logits: Float[Array, "R V"], sampling: RowSampling) -> Float[Array, "R V"]:
    """float32 logits divided by the row's temperature (greedy rows unchanged)."""
    temperature = sampling.temperature
    return logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def target_logits(logits: Float[Array, "R V"], sampling: RowSampling) -> Float[Array, "R V"]:
    """float32 logits of the law that tokens are drawn from: -inf where a token is excluded.

    In this order: temperature; ``top_k`` (the k largest, of equal ones the lower ids); ``top_p`` (of what is left,
    renormalised, the fewest largest whose mass reaches it); ``min_p`` (at least that fraction of the largest
    probability). At least one token always stays. Greedy rows are only cast.
    """
    scaled = scale(logits, sampling)
    filtered = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return jax.lax.cond(jnp.any(filtered & (sampling.temperature > 0)), _filter, lambda x, _: x, scaled, sampling)


def _filter(scaled: jax.Array, sampling: RowSampling) -> jax.Array:
    vocab = scaled.shape[1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), scaled.shape)
    descending, order = jax.lax.sort((-scaled, ids), num_keys=1, is_stable=True)
    # Each filter keeps a prefix of the sorted row, so together they keep the shortest.
    rank = jnp.arange(vocab, dtype=jnp.int32)
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
    law = jax.nn.softmax(jnp.where(rank < top_k[:, None], -descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(law, axis=-1) - law
    # A cumulative sum may pass 1 before its end: top_p 1 must not cut there.
    kept_p = jnp.where(sampling.top_p < 1, (before < sampling.top_p[:, None]).sum(-1), vocab)
    kept_min = (law >= sampling.min_p[:, None] * law[:, :1]).sum(-1)
    kept = jnp.maximum(jnp.minimum(jnp.minimum(top_k, kept_p), jnp.where(sampling.min_p > 0, kept_min, vocab)), 1)
    kept = jnp.where(sampling.temperature > 0, kept, vocab)
    rows = jnp.arange(scaled.shape[0])[:, None]
    keep = jnp.zeros(scaled.shape, jnp.bool_).at[rows, order].set(rank < kept[:, None])
    return jnp.where(keep, scaled, -jnp.inf)


def draw(logits: Float[Array, "R V"], sampling: RowSampling, positions: Int[Array, " R"], stream: int) -> jax.Array:
    """One token per row from ``softmax(logits)`` (temperature already applied); greedy rows take the largest."""

    def gumbel_max(logits: jax.Array) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys(sampling, positions, stream))
        return jnp.argmax(jnp.where(sampling.temperature[:, None] > 0, logits + noise, logits), axis=-1)

    def greedy(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits, axis=-1)

    token = jax.lax.cond(jnp.any(sampling.temperature > 0), gumbel_max, greedy, logits.astype(jnp.float32))
    return token.astype(jnp.int32)


def sample(
    logits: Float[Array, "R V"], sampling: RowSampling, positions: Int[Array, " R"], stream: int
) -> Int[Array, " R"]:
    """The token at ``positions`` of each row, from raw logits: greedy, or drawn from ``target_logits``."""
    return draw(target_logits(logits, sampling), sampling, positions, stream)
