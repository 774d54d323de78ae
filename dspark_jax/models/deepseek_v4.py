"""DeepSeek-V4: embedding, blocks, final head, and the draft stages that a checkpoint carries."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.cache.groups import CacheLayouts, Caches
from dspark_jax.config import ModelConfig
from dspark_jax.models.attention import Attention
from dspark_jax.models.block import Block, StreamReader
from dspark_jax.models.dspark import DSparkStage
from dspark_jax.models.layers import Embedding, Linear, Policy, RMSNorm
from dspark_jax.models.mtp import MTPStage
from dspark_jax.models.rows import Addressing, Rows
from pallas_kernels import _numerics as numerics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """What the trunk computes for N rows.

    ``streams`` are the residual streams after the last block. ``taps`` is the drafter's view: the mean over the
    streams after each of ``dspark_target_layer_ids``, concatenated (``None`` without a DSpark drafter).
    """

    streams: Float[Array, "N m D"]
    taps: Float[Array, "N mD"] | None


class DeepseekV4(StreamReader):
    """The model. One forward serves prefill, decode and verification: see ``Rows``.

    Parameter paths equal DeepSeek's tensor names (``layers.3.attn.wq_a.weight``); routed experts are stacked
    (``layers.3.ffn.experts.w1.weight``).
    """

    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        c = self.config = config
        self.policy = policy
        table = {"dtype": policy.dtype, "rngs": rngs}
        self.embed = Embedding(c.vocab_size, c.hidden_size, axes=("vocab", "embed"), **table)
        self.layers = nnx.List([Block(c, policy, i, ratio, rngs=rngs) for i, ratio in enumerate(c.compress_ratios)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs=rngs)
        self.head = Linear(c.hidden_size, c.vocab_size, storage="dense", axes=("vocab", "embed"), **table)
        self.declare_stream_reader(c, rngs)
        # Stages of one kind or the other: what reads them knows which (dspark.py, mtp.py).
        self.mtp: nnx.List[Any] = nnx.List([])
        if c.draft_kind == "dspark":
            self.mtp = nnx.List([DSparkStage(c, policy, k, rngs=rngs) for k in range(c.num_draft_stages)])
        elif c.draft_kind == "mtp":
            self.mtp = nnx.List([MTPStage(c, policy, rngs=rngs)])

    def embed_streams(self, token: Int[Array, " N"]) -> Float[Array, "N m D"]:
        """Embeddings copied to every stream. Ids outside the vocabulary (padding rows) read row 0."""
        inside = (token >= 0) & (token < self.config.vocab_size)
        x = self.embed(jnp.where(inside, token, 0))
        return jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1]))

    def lm_head(self, x: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """float32 logits of normed hidden states."""
        return self.head(x, out_dtype=jnp.float32)

    def logits(self, streams: Float[Array, "N m D"]) -> Float[Array, "N V"]:
        """float32 logits of the trunk (model specification, section 2.11)."""
        with jax.named_scope("lm_head"):
            return self.lm_head(self.norm(self.read_streams(streams)))

    def __call__(self, rows: Rows, caches: Caches, layouts: CacheLayouts) -> tuple[Forward, Caches]:
        """Runs every block over the rows, writing their cache entries. Returns the streams, the taps and the new
        caches."""
        where = Addressing.create(rows, self.config.sliding_window)
        inside = (rows.token >= 0) & (rows.token < self.config.vocab_size)
        token = jnp.where(inside, rows.token, 0)
        h = self.embed_streams(token)
        taps = []
        for i, (block, where_rows_lie) in enumerate(zip(self.layers, layouts.trunk, strict=True)):
            own = caches.layer(i)

            def attention(attn: Attention, x: jax.Array, cache=own, here=where_rows_lie):
                return attn(x, rows, where, cache, here)

            with jax.named_scope(f"layer_{i}"):
                h, cache = block(h, token, attention)
            caches = caches.with_layer(i, cache)
            if i in self.config.dspark_target_layer_ids:
                mean = numerics.tree_sum(h.astype(jnp.float32), 1) / h.shape[1]
                taps.append(mean.astype(h.dtype))
        return Forward(h, jnp.concatenate(taps, axis=-1) if taps else None), caches
