"""The multi-token-prediction block of preview checkpoints: one block that predicts the token after the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.cache.groups import CacheLayouts, Caches
from dspark_jax.config import ModelConfig
from dspark_jax.models.block import Block, StreamReader
from dspark_jax.models.layers import Linear, Policy, RMSNorm
from dspark_jax.models.rows import Addressing, Rows

if TYPE_CHECKING:
    from dspark_jax.models.deepseek_v4 import DeepseekV4


class MTPStage(Block, StreamReader):
    """``mtp.0`` of a preview checkpoint (model specification, section 2.12)."""

    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        super().__init__(config, policy, config.num_hidden_layers, 0, rngs=rngs)
        d, eps = config.hidden_size, config.rms_norm_eps
        matrix = {"storage": policy.linear, "dtype": policy.dtype, "rngs": rngs}
        self.e_proj = Linear(d, d, axes=("embed", None), **matrix)
        self.h_proj = Linear(d, d, axes=("embed", None), **matrix)
        self.enorm = RMSNorm(d, eps, rngs=rngs)
        self.hnorm = RMSNorm(d, eps, rngs=rngs)
        self.norm = RMSNorm(d, eps, rngs=rngs)
        self.declare_stream_reader(config, rngs)


def mtp_logits(
    model: DeepseekV4,
    caches: Caches,
    layouts: CacheLayouts,
    streams: Float[Array, "N m D"],
    next_token: Int[Array, " N"],
    rows: Rows,
    last_row: Int[Array, " R"],
) -> tuple[Float[Array, "R V"], Caches]:
    """Runs the block over trunk rows paired with the token that follows each, writing its own window rows.

    ``rows.valid`` must be false for rejected drafts. Returns the float32 logits of the token after ``next_token`` at
    ``last_row`` of each request, and the new cache.
    """
    stage = model.mtp[0]
    where = Addressing.create(rows, model.config.sliding_window, drafter=True)
    with jax.named_scope("mtp"):
        embedded = stage.e_proj(stage.enorm(model.embed_streams(next_token)[:, 0]))
        flat = stage.h_proj(stage.hnorm(streams).reshape(-1, streams.shape[-1]))
        h = embedded[:, None, :] + flat.reshape(streams.shape)
        h, cache = stage(h, None, lambda attn, x: attn(x, rows, where, caches.layer(0), layouts.draft[0]))
        last = stage.read_streams(h)[last_row]
        return model.lm_head(stage.norm(last)), caches.with_layer(0, cache)
