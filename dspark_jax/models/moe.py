"""Mixture of experts: hash or score routing, clamped SwiGLU experts and one shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import ModelConfig
from dspark_jax.models.layers import Linear, Policy, param
from pallas_kernels import _numerics as numerics
from pallas_kernels import moe as ops


class Gate(nnx.Module):
    """Router in float32: scores ``sqrt(softplus(x . w))``; hash layers choose by token id, others by score plus bias.

    The bias takes part in the choice only. Source: model specification, section 2.10.
    """

    def __init__(self, config: ModelConfig, hashed: bool, *, rngs: nnx.Rngs):
        self.top_k, self.factor, self.hashed = config.num_experts_per_tok, config.routed_scaling_factor, hashed
        experts = config.n_routed_experts
        self.weight = param(
            (experts, config.hidden_size), jnp.float32, (None, None), rngs=rngs, scale=config.hidden_size**-0.5
        )
        if hashed:
            self.tid2eid = param((config.vocab_size, self.top_k), jnp.int32, (None, None), rngs=rngs)
        else:
            self.bias = param((experts,), jnp.float32, (None,), rngs=rngs, scale=0.5)

    def __call__(
        self, x: Float[Array, "N D"], token: Int[Array, " N"] | None
    ) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        """Chosen experts and their weights (normalised, then scaled). ``token`` is needed by hash layers only."""
        logits = numerics.product(x.astype(jnp.float32), self.weight[...])
        scores = jnp.sqrt(jax.nn.softplus(logits))
        if self.hashed:
            if token is None:
                raise ValueError("a hash-routed layer needs the rows' token ids")
            ids = self.tid2eid[...][token]
        else:
            ids = jax.lax.top_k(scores + self.bias[...], self.top_k)[1].astype(jnp.int32)
        weights = jnp.take_along_axis(scores, ids, axis=1)
        return ids, weights / numerics.tree_sum(weights, 1)[:, None] * self.factor


class Experts(nnx.Module):
    """The matrices of all routed experts, stacked: w1 (gate) and w3 (up) ``[E, I, D]``, w2 (down) ``[E, D, I]``."""

    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        d, i = config.hidden_size, config.moe_intermediate_size
        stacked = {
            "storage": policy.expert,
            "dtype": policy.dtype,
            "batch": (config.n_routed_experts,),
            "batch_axes": ("experts",),
            "rngs": rngs,
        }
        self.w1 = Linear(d, i, axes=("expert_mlp", None), **stacked)
        self.w3 = Linear(d, i, axes=("expert_mlp", None), **stacked)
        self.w2 = Linear(i, d, axes=(None, "expert_mlp"), **stacked)


class SharedExpert(nnx.Module):
    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        d, i = config.hidden_size, config.shared_intermediate_size
        matrix = {"storage": policy.linear, "dtype": policy.dtype, "rngs": rngs}
        self.w1 = Linear(d, i, axes=("mlp", "embed"), **matrix)
        self.w3 = Linear(d, i, axes=("mlp", "embed"), **matrix)
        self.w2 = Linear(i, d, axes=("embed", "mlp"), **matrix)


class MoE(nnx.Module):
    """Routed experts plus the shared expert, summed in float32 and rounded once."""

    def __init__(self, config: ModelConfig, policy: Policy, hashed: bool, *, rngs: nnx.Rngs):
        self.limit = config.swiglu_limit
        self.gate = Gate(config, hashed, rngs=rngs)
        self.experts = Experts(config, policy, rngs=rngs)
        self.shared_experts = SharedExpert(config, policy, rngs=rngs)

    def __call__(self, x: Float[Array, "N D"], token: Int[Array, " N"] | None) -> Float[Array, "N D"]:
        ids, weights = self.gate(x, token)
        e, s = self.experts, self.shared_experts
        routed = ops.experts(
            x,
            ids,
            weights,
            e.w1.kernel,
            e.w3.kernel,
            e.w2.kernel,
            swiglu_limit=self.limit,
            quantize_activations=e.w1.storage != "dense",
        )
        shared = ops.swiglu(
            x,
            s.w1.kernel,
            s.w3.kernel,
            s.w2.kernel,
            swiglu_limit=self.limit,
            quantize_activations=s.w1.storage != "dense",
        )
        return (routed + shared.astype(jnp.float32)).astype(x.dtype)
