"""Plain ``jax.numpy`` meaning of the indexer's choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _numerics as numerics
from pallas_kernels.pages import DenseLayout

_TILE = 8


def select(
    q: jax.Array,
    weights: jax.Array,
    cache: jax.Array,
    layout: DenseLayout,
    page_table: jax.Array,
    row_request: jax.Array,
    visible: jax.Array,
    top_k: int,
) -> tuple[jax.Array, jax.Array]:
    size = layout.page_size
    entries = page_table.shape[1] * size
    entry = jnp.arange(entries, dtype=jnp.int32)
    slots = page_table[:, entry // size] * size + entry % size
    kept = min(top_k, entries)

    def tile(q: jax.Array, weights: jax.Array, request: jax.Array, visible: jax.Array) -> jax.Array:
        keys = cache[slots[request]].astype(q.dtype)
        dots = jnp.einsum("nhd,ned->nhe", q, keys, precision=numerics.HIGHEST, preferred_element_type=jnp.float32)
        scores = jnp.sum(jax.nn.relu(dots) * weights.astype(jnp.float32)[..., None], axis=1)
        # Rows of entries that do not exist may hold anything, so they are masked and not multiplied by zero.
        scores, index = jax.lax.top_k(jnp.where(entry < visible[:, None], scores, -jnp.inf), kept)
        chosen = jnp.where(scores > -jnp.inf, index, -1).astype(jnp.int32)
        return jnp.pad(chosen, [(0, 0), (0, top_k - kept)], constant_values=-1)

    chosen = numerics.map_row_tiles(tile, _TILE, q, weights, row_request, visible)
    return chosen, jnp.clip(visible, 0, kept).astype(jnp.int32)
