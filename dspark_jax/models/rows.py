"""The batch as the model sees it: a flat list of rows, and where each row's cache entries live."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """N rows of B requests. Prefill, decode and verify differ only in how these are filled.

    The rows of a request are contiguous and ascend in position: request b holds rows ``first_row[b]`` to
    ``first_row[b] + num_rows[b] - 1`` at positions ``start[b]`` and on. Rows outside every request are padding:
    ``valid`` is false, they write nothing and read nothing. ``slot`` is the request's place in per-request state (-1:
    padding request).

    ``window_table[b, j]`` is the physical page of logical window page j modulo the table's width (only recent pages are
    live); ``block_table[b, j]`` the physical block of logical 256-token block j. Entries without a page are 0, the
    null page.

    ``write_from[b]``: rows at lower positions are computed once more for what they feed (compressor state, logits),
    but their pages are shared with other requests and stay as they are. ``first_valid[b]``: the drafter's cache rows
    of lower positions were never written for this request and must not be read (serving contracts, section 4.1).
    """

    token: Int[Array, " N"]
    position: Int[Array, " N"]
    request: Int[Array, " N"]
    valid: Bool[Array, " N"]
    slot: Int[Array, " B"]
    start: Int[Array, " B"]
    first_row: Int[Array, " B"]
    num_rows: Int[Array, " B"]
    window_table: Int[Array, "B Pw"]
    block_table: Int[Array, "B Pb"]
    write_from: Int[Array, " B"]
    first_valid: Int[Array, " B"]


def window_slots(rows_table: Int[Array, "N Pw"], positions: Int[Array, "N ..."]) -> Int[Array, "N ..."]:
    """Physical slots of absolute positions in the window group. ``rows_table`` is the table of each row's request."""
    page = (positions // WINDOW_PAGE_TOKENS) % rows_table.shape[1]
    flat = page.reshape(page.shape[0], -1)
    physical = jnp.take_along_axis(rows_table, flat, axis=1, mode="clip").reshape(page.shape)
    return physical * WINDOW_PAGE_TOKENS + positions % WINDOW_PAGE_TOKENS


def entry_slots(rows_table: Int[Array, "N Pb"], entries: Int[Array, "N ..."], ratio: int) -> Int[Array, "N ..."]:
    """Physical slots of compressed entries; negative entries give -1."""
    per_block = BLOCK_TOKENS // ratio
    safe = jnp.maximum(entries, 0)
    flat = (safe // per_block).reshape(safe.shape[0], -1)
    physical = jnp.take_along_axis(rows_table, flat, axis=1, mode="clip").reshape(safe.shape)
    return jnp.where(entries >= 0, physical * per_block + safe % per_block, -1)


def writable(slots: Int[Array, ...], page_size: int) -> Int[Array, ...]:
    """``slots`` with those in the null page turned to -1: what many requests read must not be written by one."""
    return jnp.where(slots >= page_size, slots, -1)


def window_writes(rows: Rows) -> Int[Array, " N"]:
    """Window slot that each row writes: -1 for padding, for rows of shared pages and for tables without a page."""
    slots = window_slots(rows.window_table[rows.request], rows.position)
    owned = rows.valid & (rows.position >= rows.write_from[rows.request])
    return jnp.where(owned, writable(slots, WINDOW_PAGE_TOKENS), -1)


def entry_writes(rows: Rows, request: Int[Array, " M"], entry: Int[Array, " M"], ratio: int) -> Int[Array, " M"]:
    """Slot that each closing entry (-1: none) writes, under the rules of ``window_writes``."""
    slots = entry_slots(rows.block_table[request], entry, ratio)
    owned = entry * ratio >= rows.write_from[request]
    return jnp.where(owned, writable(slots, BLOCK_TOKENS // ratio), -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Addressing:
    """Slot lists that every layer shares, derived once a step from ``Rows``.

    ``write`` is each row's own window slot (-1: padding). ``window`` lists the keys that a row sees raw, itself
    included, oldest first; ``window_lengths`` how many of them are live.
    """

    write: Int[Array, " N"]
    window: Int[Array, "N W"]
    window_lengths: Int[Array, " N"]
    block_table: Int[Array, "N Pb"]

    @classmethod
    def create(cls, rows: Rows, window: int, *, drafter: bool = False) -> Addressing:
        """``drafter``: for a draft stage that attends like a trunk layer. It sees no row below ``first_valid``."""
        table = rows.window_table[rows.request]
        first = rows.first_valid[rows.request] if drafter else 0
        slots, lengths = trailing_window(table, rows.position + 1, window, first)
        return cls(
            write=window_writes(rows),
            window=slots,
            window_lengths=jnp.where(rows.valid, lengths, 0),
            block_table=rows.block_table[rows.request],
        )


def trailing_window(
    table: Int[Array, "N Pw"], end: Int[Array, " N"], window: int, first: Int[Array, " N"] | int = 0
) -> tuple[Int[Array, "N W"], Int[Array, " N"]]:
    """Slots of positions ``max(first, end - window) .. end - 1``, oldest first, -1 behind them, and their number."""
    length = jnp.clip(end - first, 0, window)
    offset = jnp.arange(window, dtype=jnp.int32)
    positions = (end - length)[:, None] + offset
    slots = window_slots(table, positions)
    return jnp.where(offset < length[:, None], slots, -1), length
