"""The compressor: pools the keys of 4 or 128 tokens into one cache entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import ModelConfig
from dspark_jax.models.layers import Linear, Policy, RMSNorm, param
from dspark_jax.models.rows import Rows
from pallas_kernels import _numerics as numerics
from pallas_kernels import compressor as ops


class Compressor(nnx.Module):
    """Projects each token to a key and a score per channel and pools them by softmax over a window of tokens.

    Ratio 128 pools its 128 tokens. Ratio 4 overlaps: entry i pools the low halves of tokens 4i-4..4i-1 and the high
    halves of 4i..4i+3. Everything up to the norm is float32. Source: model specification, section 2.6.
    """

    def __init__(self, config: ModelConfig, policy: Policy, ratio: int, width: int, *, rngs: nnx.Rngs):
        self.ratio = ratio
        channels = (2 if ratio == 4 else 1) * width
        dense = {"storage": "dense", "dtype": policy.dtype, "rngs": rngs}
        self.wkv = Linear(config.hidden_size, channels, axes=(None, "embed"), **dense)
        self.wgate = Linear(config.hidden_size, channels, axes=(None, "embed"), **dense)
        self.ape = param((ratio, channels), jnp.float32, (None, None), rngs=rngs, scale=0.5)
        self.norm = RMSNorm(width, config.rms_norm_eps, rngs=rngs)
        self.dtype = policy.dtype

    def __call__(
        self, x: Float[Array, "N D"], rows: Rows, state: Float[Array, "S R 2 C"]
    ) -> tuple[Float[Array, "M d"], Int[Array, " M"], Int[Array, " M"], jax.Array]:
        """Entries that close in this step, normed and not yet rotated.

        Returns ``(entries, request, entry_index, new_state)``; ``entry_index`` is -1 where fewer entries close than
        there is room for.
        """
        kv = self.wkv(x, out_dtype=jnp.float32)
        score = self.wgate(x, out_dtype=jnp.float32) + self.ape[...][rows.position % self.ratio]
        state, pooled, request, entry = ops.pool(
            state,
            kv,
            score,
            slot=rows.slot,
            start=rows.start,
            first_row=rows.first_row,
            num_rows=rows.num_rows,
            row_request=rows.request,
            ratio=self.ratio,
        )
        return self.norm(pooled.astype(self.dtype)), request, entry, state

    def rotate(
        self, entries: Float[Array, "M d"], entry: Int[Array, " M"], inv_freq: np.ndarray
    ) -> Float[Array, "M d"]:
        """Rotary position of an entry: the first token of its window."""
        return numerics.rope(entries, jnp.maximum(entry, 0) * self.ratio, inv_freq)
