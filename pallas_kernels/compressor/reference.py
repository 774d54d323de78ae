"""Plain ``jax.numpy`` meaning of the compressor's pooling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _numerics as numerics


def pool(
    ring: jax.Array,
    kv: jax.Array,
    score: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    first_row: jax.Array,
    num_rows: jax.Array,
    row_request: jax.Array,
    ratio: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    request, entry = _closing(start, num_rows, kv.shape[0] // ratio + slot.shape[0], ratio)
    low, high = (entry - 1) * ratio, (entry + 1) * ratio
    first = low if ratio == 4 else low + ratio
    span = 2 * ratio if ratio == 4 else ratio
    position = first[:, None] + jnp.arange(span, dtype=jnp.int32)
    key, weight = _read(ring, kv, score, slot, start, first_row, request, position)
    if ratio == 4:
        half = kv.shape[1] // 2
        key = jnp.concatenate([key[:, :ratio, :half], key[:, ratio:, half:]], axis=1)
        weight = jnp.concatenate([weight[:, :ratio, :half], weight[:, ratio:, half:]], axis=1)
    live = ((position >= 0) & (position < high[:, None]) & (entry >= 0)[:, None])[..., None]
    weight = jnp.where(live, weight, -jnp.inf)
    top = jnp.maximum(numerics.tree_max(weight, 1), jnp.finfo(jnp.float32).min)
    weight = jnp.exp(weight - top[:, None])
    pooled = numerics.tree_sum(jnp.where(live, weight * key, 0.0), 1)
    pooled = pooled / jnp.maximum(numerics.tree_sum(weight, 1), 1e-30)
    return _store(ring, kv, score, slot, start, first_row, num_rows, row_request), pooled, request, entry


def _closing(start: jax.Array, num_rows: jax.Array, room: int, ratio: int) -> tuple[jax.Array, jax.Array]:
    """Request and index of each entry that closes, in order; index -1 behind the last."""
    before = start // ratio
    count = (start + num_rows) // ratio - before
    end = jnp.cumsum(count)
    index = jnp.arange(room, dtype=jnp.int32)
    request = jnp.minimum((end <= index[:, None]).sum(1), start.shape[0] - 1).astype(jnp.int32)
    entry = before[request] + index - (end - count)[request]
    return request, jnp.where(index < end[-1], entry, -1).astype(jnp.int32)


def _read(ring, kv, score, slot, start, first_row, request, position) -> tuple[jax.Array, jax.Array]:
    """Key and score at absolute positions: from this call's rows, or from the ring for older ones."""
    begin = start[request][:, None]
    row = jnp.clip(first_row[request][:, None] + position - begin, 0, kv.shape[0] - 1)
    old = ring[jnp.maximum(slot[request], 0)[:, None], position % ring.shape[1]]
    new = (position >= begin)[..., None]
    return jnp.where(new, kv[row], old[..., 0, :]), jnp.where(new, score[row], old[..., 1, :])


def _store(ring, kv, score, slot, start, first_row, num_rows, row_request) -> jax.Array:
    slots, capacity = ring.shape[:2]
    offset = jnp.arange(kv.shape[0], dtype=jnp.int32) - first_row[row_request]
    count = num_rows[row_request]
    # Of a chunk longer than the ring only the newest rows are stored: two rows must not meet in one place.
    live = (offset >= 0) & (offset < count) & (offset >= count - capacity) & (slot[row_request] >= 0)
    target = jnp.where(live, slot[row_request], slots)  # past the end: mode="drop" ignores it
    place = (start[row_request] + offset) % capacity
    return ring.at[target, place].set(jnp.stack([kv, score], axis=1), mode="drop")
