"""Rejection sampling: verified drafts leave the law of the output exactly as plain decoding would have it.

Source: DSpark specification, section 4. ``q``, the law that a draft was drawn from, is kept as logits *before*
temperature and becomes ``softmax(logits / temperature)`` here, in one place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.sampling import ACCEPT, DRAFT, RESIDUAL, RowSampling, draw, keys, scale, target_logits

DraftSampling = Literal["probabilistic", "greedy"]

# Below this much mass a residual is rounding noise: p and q agree, and p itself is drawn from.
MIN_RESIDUAL_MASS = 1e-8


class Verdict(NamedTuple):
    """``tokens[r, :num_tokens[r]]`` are committed: ``num_accepted`` drafts and one more token; -1 behind them."""

    tokens: Int[Array, "R T"]
    num_tokens: Int[Array, " R"]
    num_accepted: Int[Array, " R"]


def sample_draft(
    logits: Float[Array, "R V"], sampling: RowSampling, positions: Int[Array, " R"], *, draft_sampling: DraftSampling
) -> Int[Array, " R"]:
    """One draft per row for the token at ``positions``, from the drafter's raw logits.

    ``probabilistic`` draws from ``softmax(logits / temperature)`` over the whole vocabulary: verification is exact for
    any law, so top-k and the like apply to the target only. ``greedy`` (and rows of temperature 0) take the largest.
    """
    if draft_sampling == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return draw(scale(logits, sampling), sampling, positions, DRAFT)


def acceptance(p: Float[Array, "*B"], q: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Probability of accepting a token of target probability ``p`` drawn with probability ``q``: ``min(1, p / q)``."""
    return jnp.where(q > p, p / jnp.where(q > 0, q, 1), jnp.where(p > 0, 1, 0))


def residual(p: Float[Array, "*B V"], q: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """The law of the token that replaces a rejected one: ``max(p - q, 0)`` normalised, or ``p`` if nothing is left."""
    left = jnp.maximum(p - q, 0)
    mass = left.sum(-1, keepdims=True)
    return jnp.where(mass > MIN_RESIDUAL_MASS, left / jnp.where(mass > 0, mass, 1), p)


def verify(
    logits: Float[Array, "R T V"],
    drafts: Int[Array, "R K"],
    draft_logits: Float[Array, "R K V"],
    num_drafts: Int[Array, " R"],
    sampling: RowSampling,
    positions: Int[Array, " R"],
    *,
    draft_sampling: DraftSampling,
) -> Verdict:
    """Accepts a prefix of each request's drafts and emits one token after it.

    Row 0 of ``logits`` (raw, ``T = 1 + K``) is the target's law of the token at ``positions + 1``, after the anchor at
    ``positions``; draft k (from 0) proposes the token at ``positions + 1 + k`` and was drawn from
    ``draft_logits[:, k]`` (``probabilistic``) or is their argmax (``greedy``: q is a point mass). Only the first
    ``num_drafts`` are considered, and none from the first id outside the vocabulary on. When all of those are accepted,
    the extra token comes from the target's own law: drafts that were not considered are not rejected. Temperature 0: a
    draft is accepted if it is the target's argmax.
    """
    requests, width, vocab = logits.shape
    count = width - 1
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    considered = (jnp.arange(count) < num_drafts[:, None]) & (drafts >= 0) & (drafts < vocab)
    considered = jnp.cumprod(considered.astype(jnp.int32), axis=1).astype(jnp.bool_)
    equal = drafts == best[:, :count]

    def accepted_prefix(accept: jax.Array) -> jax.Array:
        return jnp.cumprod((accept & considered).astype(jnp.int32), axis=1).sum(1)

    def greedy() -> tuple[jax.Array, jax.Array]:
        accepted = accepted_prefix(equal)
        return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]

    def sampled() -> tuple[jax.Array, jax.Array]:
        rows = sampling.repeat(width)
        p = jax.nn.softmax(target_logits(logits.reshape(-1, vocab), rows), axis=-1).reshape(logits.shape)
        token = jnp.where(considered, drafts, 0)
        if draft_sampling == "greedy":
            q = jax.nn.one_hot(token, vocab)
        else:
            q = jax.nn.softmax(scale(draft_logits.reshape(-1, vocab), sampling.repeat(count)), axis=-1)
            q = q.reshape(requests, count, vocab)
        chance = acceptance(
            jnp.take_along_axis(p[:, :count], token[..., None], axis=2)[..., 0],
            jnp.take_along_axis(q, token[..., None], axis=2)[..., 0],
        )
        decided = (positions[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)).reshape(-1)
        uniform = jax.vmap(jax.random.uniform)(keys(sampling.repeat(count), decided, ACCEPT)).reshape(chance.shape)
        random = sampling.temperature > 0
        accepted = accepted_prefix(jnp.where(random[:, None], uniform < chance, equal))
        law = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
        if count:
            last = jnp.minimum(accepted, count - 1)
            rejected = (accepted < count) & jnp.take_along_axis(considered, last[:, None], axis=1)[:, 0]
            left = residual(law, jnp.take_along_axis(q, last[:, None, None], axis=1)[:, 0])
            law = jnp.where(rejected[:, None], left, law)
        # Greedy rows take the argmax of raw logits: softmax may round two different logits to the same probability.
        raw = jnp.take_along_axis(logits, accepted[:, None, None], axis=1)[:, 0]
        law = jnp.where(random[:, None], jnp.log(law), raw.astype(jnp.float32))
        return accepted, draw(law, sampling, positions + 1 + accepted, RESIDUAL)

    accepted, extra = jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, greedy)
    offset = jnp.arange(width, dtype=jnp.int32)
    proposed = jnp.pad(drafts, [(0, 0), (0, 1)])
    tokens = jnp.where(offset < accepted[:, None], proposed, jnp.where(offset == accepted[:, None], extra[:, None], -1))
    return Verdict(tokens.astype(jnp.int32), accepted + 1, accepted)
