"""Plain ``jax.numpy`` meaning of compressed sparse MLA."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import _numerics as numerics
from pallas_kernels.kv_pages.reference import gather
from pallas_kernels.pages import Layout

# Rows at a time: their gathered keys are all that is held in memory at once.
_TILE = 8

KeyGroup = tuple[jax.Array, Layout, jax.Array, jax.Array]


def attend(
    q: jax.Array,
    groups: Sequence[KeyGroup],
    attn_sink: jax.Array | None,
    sm_scale: float,
    out_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:
    sink = jnp.full(q.shape[1], -jnp.inf) if attn_sink is None else attn_sink.astype(jnp.float32)

    def tile(q: jax.Array, *lists: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, live = [], []
        for (cache, layout, _, _), slots, lengths in zip(groups, lists[::2], lists[1::2], strict=True):
            inside = (slots >= 0) & (slots < layout.num_slots)
            live.append((jnp.arange(slots.shape[1]) < lengths[:, None]) & inside)
            keys.append(gather(cache, layout, jnp.where(live[-1], slots, -1)))
        key, mask = jnp.concatenate(keys, axis=1).astype(q.dtype), jnp.concatenate(live, axis=1)[:, None]
        logits = jnp.einsum("nhd,nkd->nhk", q, key, precision=numerics.HIGHEST, preferred_element_type=jnp.float32)
        logits = jnp.where(mask, logits * sm_scale, -jnp.inf)
        top = jnp.maximum(logits.max(-1, initial=-jnp.inf), sink)
        top = jnp.where(top == -jnp.inf, 0.0, top)  # neither keys nor a sink
        weights = jnp.where(mask, jnp.exp(logits - top[..., None]), 0.0)
        total = weights.sum(-1) + jnp.exp(sink - top)
        out = jnp.einsum(
            "nhk,nkd->nhd",
            weights.astype(q.dtype),
            key,
            precision=numerics.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        out = jnp.where(total[..., None] == 0, 0.0, out / total[..., None])
        return out.astype(out_dtype or q.dtype), top + jnp.log(total)

    return numerics.map_row_tiles(tile, _TILE, q, *(x for group in groups for x in group[2:]))
