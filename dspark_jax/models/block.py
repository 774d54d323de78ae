"""One transformer block: two sub-layers that read from and write to the residual streams (mHC)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import ModelConfig
from dspark_jax.models.attention import Attention
from dspark_jax.models.layers import Policy, RMSNorm, param
from dspark_jax.models.moe import MoE
from pallas_kernels import hyper_connections as ops

Cache = TypeVar("Cache")


class Block(nnx.Module):
    """``streams -> attention -> streams -> MoE -> streams`` with manifold-constrained hyper-connections.

    ``layer`` is the layer's number (draft stages count on from ``num_hidden_layers``): it decides how the MoE routes.
    Source: model specification, sections 2.2 and 2.11.
    """

    def __init__(self, config: ModelConfig, policy: Policy, layer: int, ratio: int, *, rngs: nnx.Rngs):
        m, d = config.hc_mult, config.hidden_size
        self.iters, self.hc_eps, self.rms_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        self.attn_norm = RMSNorm(d, config.rms_norm_eps, rngs=rngs)
        self.ffn_norm = RMSNorm(d, config.rms_norm_eps, rngs=rngs)
        self.attn = Attention(config, policy, ratio, rngs=rngs)
        self.ffn = MoE(config, policy, config.is_hash_layer(layer), rngs=rngs)
        mix = (2 + m) * m
        for name in ("attn", "ffn"):
            setattr(
                self, f"hc_{name}_fn", param((mix, m * d), jnp.float32, (None, None), rngs=rngs, scale=(m * d) ** -0.5)
            )
            setattr(self, f"hc_{name}_base", param((mix,), jnp.float32, (None,), rngs=rngs, scale=0.5))
            setattr(self, f"hc_{name}_scale", param((3,), jnp.float32, (None,), rngs=rngs, base=1.0))

    def _sub_layer(self, name: str, h: Float[Array, "N m D"], f: Callable[[jax.Array], jax.Array]) -> jax.Array:
        fn, base, scale = (getattr(self, f"hc_{name}_{part}")[...] for part in ("fn", "base", "scale"))
        with jax.named_scope(f"hc_{name}"):
            x, post, comb = ops.pre(h, fn, base, scale, rms_eps=self.rms_eps, hc_eps=self.hc_eps, iters=self.iters)
        y = f(x)
        with jax.named_scope(f"hc_{name}"):
            return ops.post(y, h, post, comb)

    def __call__(
        self,
        h: Float[Array, "N m D"],
        token: Int[Array, " N"] | None,
        attention: Callable[[Attention, Float[Array, "N D"]], tuple[Float[Array, "N D"], Cache]],
    ) -> tuple[Float[Array, "N m D"], Cache]:
        """``attention(module, x)`` runs this block's attention on the normed input and returns ``(y, cache)``: trunk
        layers and draft stages differ in the keys they see, not in the block."""
        cache: list[Cache] = []

        def attend(x: jax.Array) -> jax.Array:
            with jax.named_scope("attention"):
                y, new = attention(self.attn, self.attn_norm(x))
            cache.append(new)
            return y

        h = self._sub_layer("attn", h, attend)

        def experts(x: jax.Array) -> jax.Array:
            with jax.named_scope("moe"):
                return self.ffn(self.ffn_norm(x), token)

        return self._sub_layer("ffn", h, experts), cache[0]


class StreamReader(nnx.Module):
    """A module that ends a stack of blocks: it owns ``hc_head_{fn, base, scale}``, flat as checkpoints keep them."""

    def declare_stream_reader(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        m, d = config.hc_mult, config.hidden_size
        self.hc_mult, self.head_eps = m, (config.rms_norm_eps, config.hc_eps)
        self.hc_head_fn = param((m, m * d), jnp.float32, (None, None), rngs=rngs, scale=(m * d) ** -0.5)
        self.hc_head_base = param((m,), jnp.float32, (None,), rngs=rngs, scale=0.5)
        self.hc_head_scale = param((1,), jnp.float32, (None,), rngs=rngs, base=1.0)

    def read_streams(self, h: Float[Array, "N m D"]) -> Float[Array, "N D"]:
        """Weighted sum of the streams, before the norm (model specification, section 2.11)."""
        rms_eps, hc_eps = self.head_eps
        fn, base, scale = self.hc_head_fn[...], self.hc_head_base[...], self.hc_head_scale[...]
        return ops.head(h, fn, base, scale, rms_eps=rms_eps, hc_eps=hc_eps)
