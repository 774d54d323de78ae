"""How many rows a verification step may have, how attention splits its keys, and what that costs in scratch memory.

Everything is plain integers, known before anything is traced. Source: serving contracts, section 2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

# Up to here every plan is the same whether a capacity is declared or not.
LEGACY_ROWS = 256
MAX_CHUNKS = 256
FINE_CHUNK, MEDIUM_CHUNK, COARSE_CHUNK = 12, 64, 1024
HEAD_DIM = 512
_PAD_BYTES = 1024


def verifier_row_capacity(
    *,
    max_num_seqs: int,
    num_drafts: int,
    max_num_batched_tokens: int,
    method: Literal["dspark", "mtp", "none"],
) -> int | None:
    """The most rows that the scheduler can present for verification: ``1 + num_drafts`` for each request, within the
    token budget. ``None`` (undeclared) without a DSpark drafter. Section 2.1.

    It follows from settings alone, never from a live batch, and says nothing about prefill.
    """
    if method != "dspark" or num_drafts == 0:
        return None
    return min(max_num_batched_tokens, max_num_seqs * (1 + num_drafts))


def _check_capacity(capacity: int | None) -> None:
    if capacity is not None and capacity <= 0:
        raise ValueError(f"decode_row_capacity must be positive, got {capacity}")


def decode_regime_bound(capacity: int | None) -> int:
    """Rows up to which a step is planned as decoding. Raises ``ValueError`` for a capacity that is not positive."""
    _check_capacity(capacity)
    return max(LEGACY_ROWS, capacity or 0)


def check_decode_rows(mode: Literal["decode", "extend"], rows: int, capacity: int | None) -> None:
    """Fails closed: raises ``ValueError`` for a decode step of more rows than were declared. Section 2.1, rule 4.

    ``extend`` (prefill) is exempt, and without a declared capacity nothing is checked. The bound here is the capacity
    itself: the planner's larger regime does not make undeclared rows legal.
    """
    _check_capacity(capacity)
    if mode not in ("decode", "extend"):
        raise ValueError(f"mode must be 'decode' or 'extend', got {mode!r}")
    if mode == "decode" and capacity is not None and rows > capacity:
        raise ValueError(f"decode rows {rows} exceed the declared capacity {capacity}")


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """Keys of a row are attended in ``num_chunks`` chunks of ``chunk_size``."""

    chunk_size: int
    num_chunks: int


def chunk_limit(width: int) -> int:
    """``max_chunks`` for plans whose finest chunk is 64 keys: attention kernels split on 64-key windows."""
    return -(-width // MEDIUM_CHUNK)


@functools.cache
def split_plan(rows: int, width: int, *, max_chunks: int | None = None, capacity: int | None = None) -> SplitPlan:
    """How ``width`` keys (window and indexed together) of each of ``rows`` rows are split. Section 2.2.

    The planned number of chunks is a capacity: a launch may use fewer. Raises ``ValueError`` for a capacity that is
    not positive.
    """
    bound = decode_regime_bound(capacity)
    rows, width = max(rows, 1), max(width, 1)
    limit = max(1, min(max_chunks or MAX_CHUNKS, MAX_CHUNKS))
    for chunk in (FINE_CHUNK, MEDIUM_CHUNK) if rows <= bound else ():
        if -(-width // chunk) <= limit:
            return SplitPlan(chunk, -(-width // chunk))
    if -(-width // COARSE_CHUNK) <= limit:
        return SplitPlan(COARSE_CHUNK, -(-width // COARSE_CHUNK))
    return SplitPlan(-(-width // limit), limit)


def hca_width(max_model_len: int) -> int:
    """Indexed keys of a ratio-128 layer at the longest context, rounded up to 128. Section 2.2."""
    entries = -(-max_model_len // 128)
    return -(-entries // 128) * 128


def draft_window_width(window: int, num_drafts: int) -> int:
    """Window keys of a draft query, which also lists its own block, rounded up to 512. Section 2.2."""
    return -(-(window + num_drafts) // 512) * 512


@functools.cache
def peak_chunks(max_rows: int, width: int, *, max_chunks: int | None = None, capacity: int | None = None) -> int:
    """The most partial results (rows times chunks) of any step of up to ``max_rows`` rows. Section 2.3.

    The peak is usually not at the largest step: few rows are split finer than many.
    """
    return max(
        rows * split_plan(rows, width, max_chunks=max_chunks, capacity=capacity).num_chunks
        for rows in range(1, max(max_rows, 1) + 1)
    )


def workspace_bytes(
    *,
    max_rows: int,
    max_num_batched_tokens: int,
    width: int,
    heads: int,
    max_chunks: int | None = None,
    capacity: int | None = None,
) -> int:
    """Scratch bytes of split attention: bfloat16 partial outputs, float32 partial and final log-sum-exps and three
    control words, each padded to 1,024 bytes. Section 2.3."""
    at_most = split_plan(max_rows, width, max_chunks=max_chunks, capacity=capacity).num_chunks
    partials = max(
        peak_chunks(max_num_batched_tokens, width, max_chunks=max_chunks, capacity=capacity), max_rows * at_most
    )
    sizes = (partials * heads * HEAD_DIM * 2, partials * heads * 4, max_rows * heads * 4, 4, 4, 4)
    return sum(-(-size // _PAD_BYTES) * _PAD_BYTES for size in sizes)
