"""The DSpark drafter: a block of rows drafted in parallel, then a short Markov chain over them.

Source: DSpark specification, sections 1 and 3 (paper: arXiv 2607.05147).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.cache.groups import CacheLayouts, Caches
from dspark_jax.config import ModelConfig
from dspark_jax.models.attention import Attention
from dspark_jax.models.block import Block, StreamReader
from dspark_jax.models.layers import Embedding, Linear, Policy, RMSNorm
from dspark_jax.models.rows import trailing_window
from pallas_kernels import kv_pages

if TYPE_CHECKING:
    from dspark_jax.models.deepseek_v4 import DeepseekV4


class MarkovHead(nnx.Module):
    """Bias of the next draft's logits given the previous token: ``markov_w2 . markov_w1[token]`` (rank r)."""

    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        v, r = config.vocab_size, config.dspark_markov_rank
        self.markov_w1 = Embedding(v, r, dtype=policy.dtype, axes=(None, None), rngs=rngs)
        self.markov_w2 = Linear(r, v, storage="dense", dtype=policy.dtype, axes=(None, None), rngs=rngs)


class ConfidenceHead(nnx.Module):
    """Logit of "this draft is accepted, given that those before it are", from ``[hidden ; markov embedding]``, no
    bias."""

    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        width = config.hidden_size + config.dspark_markov_rank
        self.proj = Linear(width, 1, storage="dense", dtype=policy.dtype, rngs=rngs)


class DSparkStage(Block, StreamReader):
    """Stage k of the drafter. The first stage also owns the context projection, the last one the heads."""

    def __init__(self, config: ModelConfig, policy: Policy, stage: int, *, rngs: nnx.Rngs):
        super().__init__(config, policy, config.num_hidden_layers + stage, 0, rngs=rngs)
        d = config.hidden_size
        if stage == 0:
            self.main_proj = Linear(
                len(config.dspark_target_layer_ids) * d,
                d,
                storage=policy.linear,
                dtype=policy.dtype,
                axes=("embed", None),
                rngs=rngs,
            )
            self.main_norm = RMSNorm(d, config.rms_norm_eps, rngs=rngs)
        if stage == config.num_draft_stages - 1:
            self.norm = RMSNorm(d, config.rms_norm_eps, rngs=rngs)
            self.declare_stream_reader(config, rngs)
            self.markov_head = MarkovHead(config, policy, rngs=rngs)
            self.confidence_head = ConfidenceHead(config, policy, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftBlock:
    """Backbone output for R requests and a block of g rows each.

    ``hidden``: before the final norm (the confidence head reads it). ``base_logits``: float32, without the Markov bias.
    """

    hidden: Float[Array, "R g D"]
    base_logits: Float[Array, "R g V"]


def commit_context(
    model: DeepseekV4,
    caches: Caches,
    layouts: CacheLayouts,
    taps: Float[Array, "N mD"],
    position: Int[Array, " N"],
    slots: Int[Array, " N"],
) -> Caches:
    """Writes the drafter's context rows of committed positions: one projection, then each stage's own latent.

    ``slots`` is -1 for rows that are not committed (padding, rejected drafts): those write nothing.
    """
    with jax.named_scope("draft_context"):
        main = model.mtp[0].main_norm(model.mtp[0].main_proj(taps))
        for k, (stage, where) in enumerate(zip(model.mtp, layouts.draft, strict=True)):
            cache, latents = caches.layer(k), stage.attn.latents(main, position)
            window = kv_pages.write(cache.window, where.window, slots, latents, quantize=stage.attn.quantize)
            caches = caches.with_layer(k, dataclasses.replace(cache, window=window))
        return caches


def draft_block(
    model: DeepseekV4,
    caches: Caches,
    layouts: CacheLayouts,
    anchor: Int[Array, " R"],
    position: Int[Array, " R"],
    window_table: Int[Array, "R Pw"],
    live: Int[Array, " R"],
    first_valid: Int[Array, " R"],
    num_drafts: int = 0,
) -> DraftBlock:
    """Runs the stages over ``[anchor, noise, ...]`` at ``position ..``. Every row sees the last ``sliding_window``
    context rows, none below ``first_valid``, and all rows of its own block, in both directions; the block's keys never
    enter the cache. Requests that are not ``live`` see nothing. A block has the trained size, or ``num_drafts`` rows if
    that is more.
    """
    config = model.config
    requests, size = anchor.shape[0], max(config.dspark_block_size, num_drafts)
    token = jnp.full((requests, size), config.dspark_noise_token_id, jnp.int32).at[:, 0].set(anchor).reshape(-1)
    rows = (position[:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
    context, counts = trailing_window(window_table, position, config.sliding_window, first_valid)
    context, counts = jnp.repeat(context, size, axis=0), jnp.repeat(jnp.where(live, counts, 0), size)
    own = layouts.block_rows(size, requests)
    own_slots = jnp.arange(requests * size, dtype=jnp.int32)
    block_slots = jnp.repeat(own_slots.reshape(requests, size), size, axis=0)
    block_counts = jnp.repeat(jnp.where(live, size, 0), size)

    h = model.embed_streams(token)
    for k, (stage, where) in enumerate(zip(model.mtp, layouts.draft, strict=True)):

        def attention(attn: Attention, x: jax.Array, k=k, layout=where.window) -> tuple[jax.Array, None]:
            q, _ = attn.queries(x, rows)
            keys = kv_pages.write(own.zeros(), own, own_slots, attn.latents(x, rows), quantize=attn.quantize)
            block = (keys, own, block_slots, block_counts)
            o = attn.attend(q, caches.layer(k).window, layout, context, counts, block)
            return attn.output(o, rows), None

        with jax.named_scope(f"draft_stage_{k}"):
            h, _ = stage(h, None, attention)
    last = model.mtp[-1]
    hidden = last.read_streams(h)
    base = model.lm_head(last.norm(hidden))
    return DraftBlock(hidden.reshape(requests, size, -1), base.reshape(requests, size, -1))


def markov_step(
    model: DeepseekV4, hidden: Float[Array, "R D"], base_logits: Float[Array, "R V"], previous: Int[Array, " R"]
) -> tuple[Float[Array, "R V"], Float[Array, " R"]]:
    """Logits of one draft given the token before it, and the logit of its acceptance. Both float32."""
    last = model.mtp[-1]
    embedding = last.markov_head.markov_w1(previous)
    logits = base_logits + last.markov_head.markov_w2(embedding, out_dtype=jnp.float32)
    features = jnp.concatenate([hidden.astype(jnp.float32), embedding.astype(jnp.float32)], axis=-1)
    confidence = last.confidence_head.proj(features, out_dtype=jnp.float32)[:, 0]
    return logits, confidence
