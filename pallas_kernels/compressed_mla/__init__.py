"""Compressed sparse multi-query latent attention over two paged caches, with a sink."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels._dispatch import dispatch, on_hopper, require_float, require_shape
from pallas_kernels.compressed_mla import mosaic_sm90, reference
from pallas_kernels.pages import Layout, check_cache

__all__ = ["IMPLEMENTATIONS", "Capacity", "attend", "check_lists", "extend", "merge", "partials"]

# The reference comes first, and "mosaic" must be named, until the kernel in its present form has passed the tests that
# need a GPU: so far only the interpreter has run it.
IMPLEMENTATIONS = {"reference": reference.attend, "mosaic": on_hopper(mosaic_sm90.attend)}
EXTEND_IMPLEMENTATIONS = IMPLEMENTATIONS
# Entries of one list that the parts of a split never divide.
SPLIT_WINDOW = 64


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What a caller planned for: rows, heads and the widths of both lists. ``attend`` refuses more."""

    rows: int
    heads: int
    window: int
    indexed: int = 0

    def check(self, op: str, rows: int, heads: int, window: int, indexed: int) -> None:
        if heads != self.heads:
            raise ValueError(f"{op}: q must have the planned {self.heads} heads, got {heads}")
        for name, planned, got in (
            ("rows", self.rows, rows),
            ("window_slots width", self.window, window),
            ("indexed_slots width", self.indexed, indexed),
        ):
            if got > planned:
                raise ValueError(f"{op}: {name} must be at most the planned {planned}, got {got}")


def _groups(
    op: str,
    q: jax.Array,
    window: tuple[Any, ...],
    indexed: tuple[Any, ...],
    attn_sink: jax.Array | None,
    capacity: Capacity | None,
) -> list[Any]:
    """The arguments' groups of keys, checked."""
    require_float(op, q=q)
    if q.ndim != 3:
        raise ValueError(f"{op}: q must have shape [rows, heads, width], got {list(q.shape)}")
    rows, heads, width = q.shape
    if attn_sink is not None:
        if attn_sink.dtype != jnp.float32:
            raise TypeError(f"{op}: attn_sink must be float32, got {attn_sink.dtype}")
        require_shape(op, "attn_sink", attn_sink, (heads,))
    if any(x is None for x in indexed) and any(x is not None for x in indexed):
        raise ValueError(
            f"{op}: indexed_cache, indexed_layout, indexed_slots and indexed_lengths must be provided together"
        )
    named = [("window", *window)]
    if indexed[0] is not None:
        named.append(("indexed", *indexed))
    for name, cache, layout, slots, lengths in named:
        check_cache(op, f"{name}_cache", cache, layout)
        if layout.width != width:
            raise ValueError(
                f"{op}: q must have shape [rows, heads, {layout.width}], the width of {name}_cache, got {list(q.shape)}"
            )
        for part, array in (("slots", slots), ("lengths", lengths)):
            if array.dtype != jnp.int32:
                raise TypeError(f"{op}: {name}_{part} must be int32, got {array.dtype}")
        if slots.ndim != 2 or slots.shape[0] != rows:
            raise ValueError(
                f"{op}: {name}_slots must have shape [{rows}, any]: its row count must match that of q, "
                f"got {list(slots.shape)}"
            )
        require_shape(op, f"{name}_lengths", lengths, (rows,))
    if capacity is not None:
        capacity.check(op, rows, heads, window[2].shape[1], indexed[2].shape[1] if indexed[0] is not None else 0)
    return [group[1:] for group in named]


def _lse_unit(op: str, lse_base: str) -> float:
    if lse_base not in ("e", "2"):
        raise ValueError(f"{op}: lse_base must be 'e' or '2', got {lse_base!r}")
    return 1.0 if lse_base == "e" else 1 / math.log(2)


def attend(
    q: Float[Array, "N H d"],
    window_cache: jax.Array,
    window_layout: Layout,
    window_slots: Int[Array, "N W"],
    window_lengths: Int[Array, " N"],
    *,
    indexed_cache: jax.Array | None = None,
    indexed_layout: Layout | None = None,
    indexed_slots: Int[Array, "N E"] | None = None,
    indexed_lengths: Int[Array, " N"] | None = None,
    attn_sink: Float[Array, " H"] | None = None,
    sm_scale: float,
    return_lse: bool = False,
    lse_base: str = "e",
    out: Float[Array, "N H d"] | None = None,
    capacity: Capacity | None = None,
    implementation: str | None = None,
):
    """One softmax per head over listed rows of a window cache and, optionally, of an indexed cache.

    ``key_n`` is a whole cache row and serves as value too. With ``l_n = sm_scale * q . key_n``::

        o = sum_n exp(l_n) key_n / (sum_n exp(l_n) + exp(attn_sink))        lse = log of the denominator

    The first ``lengths`` entries of a row's slot list are live (slots among them that the cache does not have are
    skipped, a slot that is listed twice counts twice); the order of keys does not matter. A row without any key gives
    zeros. Scores and sums are float32; the weights are rounded to the dtype of ``q`` before they meet the values. The
    sink is a logit: it is not scaled and has no value. For decoding and verification: any number of rows, whose
    results depend neither on each other nor on the number of rows. Source: model specification, section 2.8; serving
    contracts, section 3.

    Args:
      q: rotated queries ``[N, H, d]``, float32 or bfloat16.
      window_cache, window_layout: the array of ``window_layout``, rows of width d.
      window_slots, window_lengths: int32 ``[N, W]`` and ``[N]``.
      indexed_cache, indexed_layout, indexed_slots, indexed_lengths: the same for compressed entries; all or none.
      attn_sink: float32 ``[H]``, or none.
      return_lse: also return float32 ``[N, H]``; ``lse_base``: ``"e"`` (natural) or ``"2"``.
      out: an array like the result whose memory the result takes when the caller donates it. Never read.
      capacity: what the caller planned for.

    Returns:
      ``[N, H, d]`` in the dtype of ``q`` (and the log-sum-exp, minus infinity for neither keys nor a sink).

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit, or more than the capacity, with the numbers.
      NotImplementedError: no implementation (or not the named one) takes the case.
    """
    return _attend(
        "compressed_mla.attend",
        IMPLEMENTATIONS,
        q,
        (window_cache, window_layout, window_slots, window_lengths),
        (indexed_cache, indexed_layout, indexed_slots, indexed_lengths),
        attn_sink,
        sm_scale,
        return_lse,
        lse_base,
        out,
        capacity,
        implementation,
    )


def extend(
    q: Float[Array, "N H d"],
    window_cache: jax.Array,
    window_layout: Layout,
    window_slots: Int[Array, "N W"],
    window_lengths: Int[Array, " N"],
    *,
    indexed_cache: jax.Array | None = None,
    indexed_layout: Layout | None = None,
    indexed_slots: Int[Array, "N E"] | None = None,
    indexed_lengths: Int[Array, " N"] | None = None,
    attn_sink: Float[Array, " H"] | None = None,
    sm_scale: float,
    return_lse: bool = False,
    lse_base: str = "e",
    out: Float[Array, "N H d"] | None = None,
    capacity: Capacity | None = None,
    implementation: str | None = None,
):
    """``attend`` for chunks of a prompt: the same mathematics, arguments and errors, implementations made for
    thousands of rows."""
    return _attend(
        "compressed_mla.extend",
        EXTEND_IMPLEMENTATIONS,
        q,
        (window_cache, window_layout, window_slots, window_lengths),
        (indexed_cache, indexed_layout, indexed_slots, indexed_lengths),
        attn_sink,
        sm_scale,
        return_lse,
        lse_base,
        out,
        capacity,
        implementation,
    )


def _attend(op, implementations, q, window, indexed, attn_sink, sm_scale, return_lse, lse_base, out, capacity, name):
    unit = _lse_unit(op, lse_base)
    groups = _groups(op, q, window, indexed, attn_sink, capacity)
    if out is not None:
        require_shape(op, "out", out, q.shape)
        if out.dtype != q.dtype:
            raise TypeError(f"{op}: out must be {q.dtype} as q, got {out.dtype}")
    groups = [group for group in groups if group[2].shape[1]]
    if groups and q.shape[0]:
        result, lse = dispatch(op, implementations, name, q, groups, attn_sink, sm_scale)
    else:
        nothing = jnp.full(q.shape[1], -jnp.inf) if attn_sink is None else attn_sink
        result, lse = jnp.zeros_like(q), jnp.broadcast_to(nothing, q.shape[:2])
    if out is not None:
        result = jnp.where(True, result, out)  # the result alone; keeps the argument, and with it its memory
    return (result, lse * unit) if return_lse else result


def partials(
    q: Float[Array, "N H d"],
    window_cache: jax.Array,
    window_layout: Layout,
    window_slots: Int[Array, "N W"],
    window_lengths: Int[Array, " N"],
    *,
    indexed_cache: jax.Array | None = None,
    indexed_layout: Layout | None = None,
    indexed_slots: Int[Array, "N E"] | None = None,
    indexed_lengths: Int[Array, " N"] | None = None,
    sm_scale: float,
    num_splits: int,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "N S H d"], Float[Array, "N S H"]]:
    """``attend`` without a sink over each of ``num_splits`` parts of the lists, for ``merge``.

    Parts are runs of whole windows of 64 entries of the window list and then of the indexed list, as equal as that
    allows; later ones may be empty (zeros, log-sum-exp minus infinity). Natural logarithms.
    Source: serving contracts, section 3.4. Raises as ``attend``, and ``ValueError`` for ``num_splits`` below 1.
    """
    op = "compressed_mla.partials"
    window = (window_cache, window_layout, window_slots, window_lengths)
    indexed = (indexed_cache, indexed_layout, indexed_slots, indexed_lengths)
    groups = _groups(op, q, window, indexed, None, None)
    if num_splits < 1:
        raise ValueError(f"{op}: num_splits must be positive, got {num_splits}")
    windows = [(g, at) for g, group in enumerate(groups) for at in range(0, group[2].shape[1], SPLIT_WINDOW)]
    size = -(-len(windows) // num_splits)
    results = []
    for part in (windows[i * size : (i + 1) * size] for i in range(num_splits)):
        some = []
        for g, (cache, layout, slots, lengths) in enumerate(groups):
            starts = [at for group, at in part if group == g]
            if starts:
                first = starts[0]
                some.append((cache, layout, slots[:, first : starts[-1] + SPLIT_WINDOW], lengths - first))
        if some:
            results.append(dispatch(op, IMPLEMENTATIONS, implementation, q, some, None, sm_scale, out_dtype))
        else:
            empty = jnp.zeros(q.shape, out_dtype or q.dtype)
            results.append((empty, jnp.full(q.shape[:2], -jnp.inf, jnp.float32)))
    return jnp.stack([out for out, _ in results], axis=1), jnp.stack([lse for _, lse in results], axis=1)


def merge(
    out: Float[Array, "N S H d"],
    lse: Float[Array, "N S H"],
    attn_sink: Float[Array, " H"] | None = None,
    num_live: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "N H d"], Float[Array, "N H"]]:
    """Joins the results of parts of the keys, and folds the sink in, once.

    ``lse`` are natural logarithms without a sink. Parts from ``num_live`` on, and those whose ``lse`` is minus
    infinity, are not read: they may hold anything. ``num_live`` may be traced, so that one compiled program serves
    fewer parts than it was planned for. Source: serving contracts, section 3.4.

    Raises ``ValueError`` for shapes that do not fit.
    """
    op = "compressed_mla.merge"
    require_float(op, out=out, lse=lse)
    require_shape(op, "out", out, (None, None, None, None))
    rows, splits, heads, _ = out.shape
    require_shape(op, "lse", lse, (rows, splits, heads))
    sink = jnp.full(heads, -jnp.inf) if attn_sink is None else attn_sink
    require_shape(op, "attn_sink", sink, (heads,))
    live = lse > -jnp.inf
    if num_live is not None:
        live &= jnp.arange(splits)[:, None] < num_live
    lse = jnp.where(live, lse, -jnp.inf)
    top = jnp.maximum(lse.max(axis=1), sink)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lse - top[:, None])
    total = weights.sum(axis=1) + jnp.exp(sink - top)
    parts = jnp.where(live[..., None], out.astype(jnp.float32), 0.0) * weights[..., None]
    joined = jnp.where(total[..., None] == 0, 0.0, parts.sum(axis=1) / total[..., None])
    return joined.astype(out.dtype), top + jnp.log(total)


def check_lists(layout: Layout, slots: Any, lengths: Any) -> None:
    """What producers of slot lists promise, checked on the host (for debugging; the operations mask what is wrong).

    Raises ``ValueError`` for a negative length, a negative slot before a live one ("interior sentinel") and a slot that
    the cache does not have. Source: serving contracts, section 3.3.
    """
    slots, lengths = np.asarray(slots), np.asarray(lengths)
    if (lengths < 0).any():
        raise ValueError(f"topk length must be non-negative, got {lengths.min()} at row {int(lengths.argmin())}")
    live = np.arange(slots.shape[1]) < lengths[:, None]
    dead = live & (slots < 0)
    interior = (np.logical_or.accumulate(dead, axis=1) & live & (slots >= 0)).any(axis=1)
    if interior.any():
        raise ValueError(f"interior sentinel at row {int(interior.argmax())}: live slots must come before -1")
    beyond = live & (slots >= layout.num_slots)
    if beyond.any():
        row, entry = np.argwhere(beyond)[0]
        raise ValueError(
            f"slots exceed the page capacity: expected less than {layout.num_slots}, got {slots[row, entry]} "
            f"at row {row}"
        )
