"""The shapes that exist: how many rows a compiled step has. Everything derives from the engine's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from dspark_jax.config import ConfigError, EngineConfig, ModelConfig
from dspark_jax.spec_decode.capacity import verifier_row_capacity
from dspark_jax.spec_decode.depth import DepthSchedule

# One step may be on its way while the next is planned (see engine.py), so a request's true position can lag the
# host's upper bound by this many steps.
MAX_STEPS_IN_FLIGHT = 2
# A request that continues cached blocks recomputes this many tokens before their end: the ratio-4 compressors pool
# them into the first new entry, and the last one's logits are the next token's law.
RECOMPUTED_TOKENS = 4


def ladder(largest: int, smallest: int = 1, factor: int = 2) -> tuple[int, ...]:
    """``smallest, smallest * factor, ...`` up to ``largest``, which is always the last even if it is off the ladder."""
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def bucket_for(size: int, sizes: tuple[int, ...], what: str) -> int:
    """The smallest bucket that holds ``size``. Raises ``ValueError`` (on the host, before dispatch) above the last."""
    for bucket in sizes:
        if bucket >= size:
            return bucket
    raise ValueError(f"{what} {size} exceed the largest compiled bucket {sizes[-1]}")


def is_uniform_verify(row_counts: Sequence[int], prefilling: Sequence[bool], width: int) -> bool:
    """Whether rows of a step form a uniform verification: ``width`` rows of every request, and none of them prefilling.

    The row counts alone do not tell: a chunk of a prompt may happen to have ``width`` tokens (serving contracts,
    section 4.7).
    """
    return not any(prefilling) and all(count == width for count in row_counts)


@dataclasses.dataclass(frozen=True, order=True)
class DecodeShape:
    """A compiled verification step: up to ``num_seqs`` requests with ``num_drafts`` drafts each (0: plain decoding)."""

    num_seqs: int
    num_drafts: int

    @property
    def rows(self) -> int:
        return self.num_seqs * (1 + self.num_drafts)


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """Every static size of the compiled steps.

    ``decode`` ascends in requests; the first shape that holds a batch also has the depth that the schedule wants for
    it. ``prefill`` holds token counts; ``max_prefill_seqs`` requests share a prefill step. ``capacity`` is the most
    rows of a verification (``None``: undeclared, see ``verifier_row_capacity``). ``window_pages`` is the width of a
    request's window table, ``block_pages`` of its block table, ``tail_pages`` the window pages that a cached prefix
    needs at its end (0: no prefix cache).

    Raises ``ConfigError`` if a decode shape exceeds the capacity.
    """

    num_drafts: int
    capacity: int | None
    decode: tuple[DecodeShape, ...]
    prefill: tuple[int, ...]
    max_prefill_seqs: int
    window_pages: int
    block_pages: int
    max_model_len: int
    num_blocks: int
    num_window_pages: int
    tail_pages: int = 0

    def __post_init__(self) -> None:
        for shape in self.decode:
            if self.capacity is not None and shape.rows > self.capacity:
                raise ConfigError(
                    f"decode_row_capacity {self.capacity} is smaller than the {shape.rows} rows that "
                    f"{shape.num_seqs} requests of 1 + {shape.num_drafts} rows present: raise it, or lower "
                    "max_num_seqs, num_speculative_tokens or max_num_batched_tokens"
                )

    @property
    def max_decode_seqs(self) -> int:
        """Requests that one decode step can hold. Others wait for the next."""
        return self.decode[-1].num_seqs

    def decode_shape(self, num_seqs: int) -> DecodeShape:
        """The compiled shape of a decode step. Raises ``ValueError`` for more requests than any holds."""
        sizes = tuple(shape.num_seqs for shape in self.decode)
        return self.decode[sizes.index(bucket_for(num_seqs, sizes, "decode requests"))]

    @classmethod
    def create(cls, model: ModelConfig, engine: EngineConfig) -> StepShapes:
        """The shapes of an engine. Raises ``ConfigError`` naming the knob whose number does not fit."""
        k = engine.speculative.resolve(model)
        if engine.max_num_batched_tokens < 1 + k:
            raise ConfigError(
                f"max_num_batched_tokens must hold one verification of 1 + {k} rows, "
                f"got {engine.max_num_batched_tokens}"
            )
        if engine.max_model_len > model.max_position_embeddings:
            raise ConfigError(
                f"max_model_len must be at most max_position_embeddings {model.max_position_embeddings}, "
                f"got {engine.max_model_len}"
            )
        block_pages = -(-engine.max_model_len // BLOCK_TOKENS)
        num_blocks = engine.num_blocks or engine.max_num_seqs * block_pages + 1
        if num_blocks - 1 < block_pages:
            raise ConfigError(
                f"num_blocks must hold one request of max_model_len {engine.max_model_len}: expected at least "
                f"{block_pages + 1} (one is reserved), got {num_blocks}"
            )
        page = WINDOW_PAGE_TOKENS
        # Live positions of a request: the window, one more that the drafter reads, what a continued prefix recomputes
        # and what steps under way may write.
        kept = model.sliding_window + 1 + RECOMPUTED_TOKENS + MAX_STEPS_IN_FLIGHT * (1 + k)
        pages_kept, pages_written = -(-kept // page) + 1, -(-engine.max_num_batched_tokens // page) + 1
        # A chunk's pages come out of one budget of max_num_batched_tokens, shared by the requests of a step.
        max_prefill_seqs = min(engine.max_num_seqs, 8)
        tail_pages = -(-(model.sliding_window + RECOMPUTED_TOKENS - 1) // page) if engine.prefix_caching else 0
        tails = engine.num_prefix_tails
        tails = max(engine.max_num_seqs, num_blocks // 4) if tails is None else tails
        capacity = verifier_row_capacity(
            max_num_seqs=engine.max_num_seqs,
            num_drafts=k,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            method=model.draft_kind,
        )
        prefill = engine.prefill_buckets
        if prefill is None:
            smallest = min(64, engine.max_num_batched_tokens)
            prefill = ladder(engine.max_num_batched_tokens, smallest=smallest, factor=4)
        return cls(
            num_drafts=k,
            capacity=engine.decode_row_capacity or capacity,
            decode=_decode_shapes(engine, k),
            prefill=tuple(sorted({*prefill, engine.max_num_batched_tokens})),
            max_prefill_seqs=max_prefill_seqs,
            window_pages=pages_kept + pages_written,
            block_pages=block_pages,
            max_model_len=engine.max_model_len,
            num_blocks=num_blocks,
            num_window_pages=1
            + engine.max_num_seqs * pages_kept
            + pages_written
            + max_prefill_seqs
            + tails * tail_pages,
            tail_pages=tail_pages,
        )


def _decode_shapes(engine: EngineConfig, k: int) -> tuple[DecodeShape, ...]:
    """One shape per bucket, with the depth of the schedule's range that the bucket ends in. No shape is empty: where
    nothing is drafted a request still has the row of its last token."""
    budget = engine.max_num_batched_tokens
    schedule = DepthSchedule.create(engine.speculative.depth_schedule, k)
    if len(schedule.ranges) == 1:
        # Requests that do not fit in one step take turns.
        largest = min(engine.max_num_seqs, budget // (1 + schedule.depth(1)))
    else:
        largest = engine.max_num_seqs
        for end, depth in schedule.ranges:
            rows = min(end, largest) * (1 + depth)
            if rows > budget:
                raise ConfigError(
                    f"depth_schedule asks for {min(end, largest)} requests of 1 + {depth} rows, which is more than "
                    f"max_num_batched_tokens {budget}"
                )
    ends = [int(end) for end, _ in schedule.ranges if end < largest]
    buckets = engine.decode_buckets or ladder(largest)
    return tuple(
        DecodeShape(n, schedule.depth(n)) for n in sorted({*(b for b in buckets if b < largest), *ends, largest})
    )
