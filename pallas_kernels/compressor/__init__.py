"""Pooling of projected keys into compressed cache entries, and the ring of unfinished windows."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels._dispatch import dispatch, require_integer, require_shape
from pallas_kernels.compressor import reference

__all__ = ["pool"]


def pool(
    ring: Float[Array, "S R 2 C"],
    kv: Float[Array, "N C"],
    score: Float[Array, "N C"],
    *,
    slot: Int[Array, " B"],
    start: Int[Array, " B"],
    first_row: Int[Array, " B"],
    num_rows: Int[Array, " B"],
    row_request: Int[Array, " N"],
    ratio: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "S R 2 C"], Float[Array, "M d"], Int[Array, " M"], Int[Array, " M"]]:
    """Entries that close in this call, pooled by a softmax per channel over their window of tokens.

    Request b brings ``num_rows[b]`` rows from ``first_row[b]`` on, at absolute positions ``start[b] ..``; its entry i
    closes with the token at ``(i + 1) * ratio - 1``. Ratio 128 pools its own 128 tokens (d = C). Ratio 4 overlaps: the
    low half of the channels of tokens ``4i-4 .. 4i-1`` and the high half of ``4i .. 4i+3`` (d = C / 2; tokens before
    the sequence weigh nothing). Tokens of earlier calls are read from ``ring[slot[b], position % R]`` (key, then score
    with the position bias already added), so ``R`` must be at least ``ratio`` (twice that for 4) plus the most rows
    that a later call may take back. All float32. Source: model specification, sections 2.6 and 4.3.

    Returns the ring with this call's rows (requests with slot -1 write nothing), the pooled entries, each one's request
    and its index (-1 where fewer entries close than there is room for, ``M = N // ratio + B``).

    Raises ``ValueError`` for shapes that do not fit or a ratio other than 4 and 128.
    """
    op = "compressor.pool"
    if ratio not in (4, 128):
        raise ValueError(f"{op}: ratio must be 4 or 128, got {ratio}")
    rows, channels = kv.shape
    require_shape(op, "score", score, (rows, channels))
    require_shape(op, "ring", ring, (None, None, 2, channels))
    span = 2 * ratio if ratio == 4 else ratio
    if ring.shape[1] < span:
        raise ValueError(f"{op}: ring must hold at least {span} positions, got {ring.shape[1]}")
    per_request = {"slot": slot, "start": start, "first_row": first_row, "num_rows": num_rows}
    require_integer(op, row_request=row_request, **per_request)
    for name, array in per_request.items():
        require_shape(op, name, array, (slot.shape[0],))
    require_shape(op, "row_request", row_request, (rows,))
    return dispatch(
        op,
        {"reference": reference.pool},
        implementation,
        ring,
        kv,
        score,
        slot,
        start,
        first_row,
        num_rows,
        row_request,
        ratio,
    )
