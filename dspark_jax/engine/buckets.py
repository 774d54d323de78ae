"""The shapes that exist: how many rows a compiled step has. Everything derives from the engine's configuration."""

from __future__ import annotations

import dataclasses

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from dspark_jax.config import ConfigError, EngineConfig, ModelConfig

# One step may be on its way while the next is planned (see engine.py), so a request's true position can lag the
# host's upper bound by this many steps.
MAX_STEPS_IN_FLIGHT = 2


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


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """Every static size of the compiled steps.

    ``decode`` holds request counts (rows = count * (1 + num_drafts)), ``prefill`` token counts. ``max_prefill_seqs``
    requests share a prefill step. ``window_pages`` is the width of a request's window table, ``block_pages`` of its
    block table.
    """

    num_drafts: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    max_prefill_seqs: int
    window_pages: int
    block_pages: int
    max_model_len: int
    num_blocks: int
    num_window_pages: int

    @classmethod
    def create(cls, model: ModelConfig, engine: EngineConfig) -> StepShapes:
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
        # Live positions of a request: the window, one more that the drafter reads, and what steps under way may write.
        kept = model.sliding_window + 1 + MAX_STEPS_IN_FLIGHT * (1 + k)
        page = WINDOW_PAGE_TOKENS
        pages_kept, pages_written = -(-kept // page) + 1, -(-engine.max_num_batched_tokens // page) + 1
        # A chunk's pages come out of one budget of max_num_batched_tokens, shared by the requests of a step.
        max_prefill_seqs = min(engine.max_num_seqs, 8)
        return cls(
            num_drafts=k,
            decode=ladder(engine.max_num_seqs),
            prefill=ladder(engine.max_num_batched_tokens, smallest=min(64, engine.max_num_batched_tokens), factor=4),
            max_prefill_seqs=max_prefill_seqs,
            window_pages=pages_kept + pages_written,
            block_pages=block_pages,
            max_model_len=engine.max_model_len,
            num_blocks=num_blocks,
            num_window_pages=1 + engine.max_num_seqs * pages_kept + pages_written + max_prefill_seqs,
        )
