"""Attention of trunk layers and draft stages: one latent per token serves as key and value for every head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.cache.allocator import BLOCK_TOKENS
from dspark_jax.cache.groups import LayerCache, LayerLayouts
from dspark_jax.config import ModelConfig
from dspark_jax.models.compressor import Compressor
from dspark_jax.models.indexer import Indexer
from dspark_jax.models.layers import Linear, Policy, RMSNorm, param
from dspark_jax.models.rope import inverse_frequencies
from dspark_jax.models.rows import Addressing, Rows, entry_slots, entry_writes
from pallas_kernels import _numerics as numerics
from pallas_kernels import compressed_mla, kv_pages
from pallas_kernels.linear import grouped_linear


class Attention(nnx.Module):
    """Multi-query latent attention with a sliding window and, by ``ratio``, compressed entries.

    ``ratio`` 0: the window only. 4 (CSA): the window and the entries that the indexer selects. 128 (HCA): the window
    and every closed entry. One softmax over all of them, with a learned sink logit per head. Source: model
    specification, sections 2.4 to 2.9.
    """

    def __init__(self, config: ModelConfig, policy: Policy, ratio: int, *, rngs: nnx.Rngs):
        c, self.ratio, self.quantize = config, ratio, policy.quantize
        self.heads, self.head_dim, self.groups, self.eps = c.num_attention_heads, c.head_dim, c.o_groups, c.rms_norm_eps
        self.config = config
        matrix = {"storage": policy.linear, "dtype": policy.dtype, "rngs": rngs}
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, axes=(None, "embed"), **matrix)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps, rngs=rngs)
        self.wq_b = Linear(c.q_lora_rank, self.heads * c.head_dim, axes=("heads", None), **matrix)
        self.wkv = Linear(c.hidden_size, c.head_dim, axes=(None, "embed"), **matrix)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps, rngs=rngs)
        self.attn_sink = param((self.heads,), jnp.float32, ("heads",), rngs=rngs, scale=0.5)
        self.wo_a = Linear(
            self.heads * c.head_dim // c.o_groups, c.o_groups * c.o_lora_rank, axes=("groups", None), **matrix
        )
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, axes=("embed", "groups"), **matrix)
        if ratio:
            self.compressor = Compressor(config, policy, ratio, c.head_dim, rngs=rngs)
        if ratio == 4:
            self.indexer = Indexer(config, policy, rngs=rngs)

    @property
    def inv_freq(self) -> np.ndarray:
        """Rotary frequencies of this layer's kind (computed at trace time: a constant of the program)."""
        return inverse_frequencies(self.config, self.ratio)

    def queries(
        self, x: Float[Array, "N D"], position: Int[Array, " N"]
    ) -> tuple[Float[Array, "N H d"], Float[Array, "N Q"]]:
        """Rotated queries, normed per head without a weight, and the low-rank queries that the indexer shares."""
        c_q = self.q_norm(self.wq_a(x))
        q = self.wq_b(c_q).reshape(-1, self.heads, self.head_dim)
        return numerics.rope(numerics.rms_norm(q, None, self.eps), position, self.inv_freq), c_q

    def latents(self, x: Float[Array, "N D"], position: Int[Array, " N"]) -> Float[Array, "N d"]:
        """Rotated keys (= values) of ``x`` at ``position``; the cache write quantises them."""
        return numerics.rope(self.kv_norm(self.wkv(x)), position, self.inv_freq)

    def output(self, o: Float[Array, "N H d"], position: Int[Array, " N"]) -> Float[Array, "N D"]:
        """Turns the rotary channels back by the query's position, then the grouped low-rank projection."""
        o = numerics.rope(o, position, self.inv_freq, inverse=True)
        o = o.reshape(o.shape[0], self.groups, -1)
        z = grouped_linear(o, self.wo_a.kernel)
        return self.wo_b(z.reshape(z.shape[0], -1))

    def attend(self, q, window_cache, window_layout, window, lengths, indexed=None) -> Float[Array, "N H d"]:
        cache, layout, slots, counts = indexed or (None, None, None, None)
        out: Any = compressed_mla.attend(
            q,
            window_cache,
            window_layout,
            window,
            lengths,
            indexed_cache=cache,
            indexed_layout=layout,
            indexed_slots=slots,
            indexed_lengths=counts,
            attn_sink=self.attn_sink[...],
            sm_scale=self.head_dim**-0.5,
        )
        return out

    def __call__(
        self, x: Float[Array, "N D"], rows: Rows, where: Addressing, cache: LayerCache, layouts: LayerLayouts
    ) -> tuple[Float[Array, "N D"], LayerCache]:
        """Writes this step's rows and the entries that they close, then attends: later rows see earlier ones in the
        cache."""
        q, c_q = self.queries(x, rows.position)
        window = kv_pages.write(
            cache.window, layouts.window, where.write, self.latents(x, rows.position), quantize=self.quantize
        )
        cache = dataclasses.replace(cache, window=window)
        indexed = None
        if self.ratio:
            cache = self._compress(x, rows, cache, layouts)
            if self.ratio == 4:
                entries, counts, cache = self.indexer(x, c_q, rows, cache, layouts, self.inv_freq)
            else:
                counts = jnp.where(rows.valid, (rows.position + 1) // self.ratio, 0)
                every = jnp.arange(where.block_table.shape[1] * (BLOCK_TOKENS // self.ratio), dtype=jnp.int32)
                entries = jnp.where(every < counts[:, None], every, -1)
            slots = entry_slots(where.block_table, entries, self.ratio)
            indexed = (cache.entries, layouts.entries, slots, counts)
        o = self.attend(q, window, layouts.window, where.window, where.window_lengths, indexed)
        return self.output(o, rows.position), cache

    def _compress(self, x, rows: Rows, cache: LayerCache, layouts: LayerLayouts) -> LayerCache:
        assert cache.state is not None
        assert cache.entries is not None
        pooled, request, entry, state = self.compressor(x, rows, cache.state)
        pooled = self.compressor.rotate(pooled, entry, self.inv_freq)
        assert layouts.entries is not None
        slots = entry_writes(rows, request, entry, self.ratio)
        entries = kv_pages.write(cache.entries, layouts.entries, slots, pooled, quantize=self.quantize)
        return dataclasses.replace(cache, entries=entries, state=state)
