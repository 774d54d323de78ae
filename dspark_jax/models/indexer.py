"""The lightning indexer of CSA layers: which compressed entries each query attends to."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.cache.groups import LayerCache, LayerLayouts
from dspark_jax.config import ModelConfig
from dspark_jax.models.compressor import Compressor
from dspark_jax.models.layers import Linear, Policy
from dspark_jax.models.rows import Rows, entry_writes
from pallas_kernels import indexer as ops
from pallas_kernels import kv_pages


class Indexer(nnx.Module):
    """Scores every visible entry by ``sum_h w_h relu(q_h . k)`` and keeps the best ``index_topk``.

    Source: model specification, section 2.7. In ``exact`` precision the Hadamard rotation is left out of queries and
    keys alike (it cancels) together with the FP4 rounding.
    """

    def __init__(self, config: ModelConfig, policy: Policy, *, rngs: nnx.Rngs):
        heads, width = config.index_n_heads, config.index_head_dim
        self.heads, self.width, self.top_k = heads, width, config.index_topk
        self.quantize = policy.quantize
        self.wq_b = Linear(
            config.q_lora_rank,
            heads * width,
            storage=policy.linear,
            dtype=policy.dtype,
            axes=("index_heads", None),
            rngs=rngs,
        )
        self.weights_proj = Linear(config.hidden_size, heads, storage="dense", dtype=policy.dtype, rngs=rngs)
        self.compressor = Compressor(config, policy, 4, width, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "N D"],
        c_q: Float[Array, "N Q"],
        rows: Rows,
        cache: LayerCache,
        layouts: LayerLayouts,
        inv_freq: np.ndarray,
    ) -> tuple[Int[Array, "N topk"], Int[Array, " N"], LayerCache]:
        """Writes the index keys that close in this step, then selects. Returns entry numbers (-1 behind them), counts,
        cache."""
        assert cache.index_state is not None
        assert cache.index_entries is not None
        assert layouts.index is not None
        keys, request, entry, state = self.compressor(x, rows, cache.index_state)
        keys = ops.prepare_key(keys, jnp.maximum(entry, 0) * 4, inv_freq, quantize=self.quantize)
        slots = entry_writes(rows, request, entry, 4)
        index_entries = kv_pages.write(cache.index_entries, layouts.index, slots, keys, quantize=False)
        cache = dataclasses.replace(cache, index_entries=index_entries, index_state=state)

        q = self.wq_b(c_q).reshape(-1, self.heads, self.width)
        q = ops.prepare_query(q, rows.position, inv_freq, quantize=self.quantize)
        weights = self.weights_proj(x).astype(jnp.float32) * (self.width**-0.5 * self.heads**-0.5)
        visible = jnp.where(rows.valid, (rows.position + 1) // 4, 0)
        entries, lengths = ops.select(
            q, weights, index_entries, layouts.index, rows.block_table, rows.request, visible, self.top_k
        )
        return entries, lengths, cache
