"""What an engine of given settings will compile and allocate, worked out without a device."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from dspark_jax.cache.groups import CacheLayouts
from dspark_jax.config import ConfigError, EngineConfig, ModelConfig
from dspark_jax.engine.buckets import StepShapes
from dspark_jax.engine.build import abstract_model, parameter_targets
from dspark_jax.models import Policy
from dspark_jax.spec_decode.capacity import (
    SplitPlan,
    chunk_limit,
    decode_regime_bound,
    draft_window_width,
    hca_width,
    peak_chunks,
    split_plan,
    workspace_bytes,
)

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Split attention of one kind of layer: ``width`` keys a row, planned for ``capacity`` decode rows (``None``: not a
    verification). ``decode`` is the plan up to ``decode_rows``, ``extend`` the one beyond. ``partials``: the most
    partial results at once."""

    name: str
    width: int
    capacity: int | None
    decode_rows: int
    decode: SplitPlan
    extend: SplitPlan
    partials: int
    workspace_bytes: int


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """Shapes, attention splits and memory of an engine. Bytes are of one device that holds everything."""

    max_num_seqs: int
    num_drafts: int
    max_num_batched_tokens: int
    max_model_len: int
    heads: int
    shapes: StepShapes
    attention: tuple[AttentionPlan, ...]
    memory: dict[str, int]

    @classmethod
    def create(
        cls, model: ModelConfig, engine: EngineConfig, *, heads: int | None = None, index_topk: int | None = None
    ) -> EnginePlan:
        """The plan of ``engine`` serving ``model``. ``heads`` are the query heads of one device (default: all);
        ``index_topk`` stands in for the model's.

        Raises ``ConfigError`` where the engine would.
        """
        shapes = StepShapes.create(model, engine)
        heads = model.num_attention_heads if heads is None else heads
        top_k = model.index_topk if index_topk is None else index_topk
        for name, value in (("heads", heads), ("index_topk", top_k)):
            if value < 1:
                raise ConfigError(f"{name} must be positive, got {value}")
        return cls(
            engine.max_num_seqs,
            shapes.num_drafts,
            engine.max_num_batched_tokens,
            engine.max_model_len,
            heads,
            shapes,
            tuple(_attention(model, engine, shapes, heads, top_k)),
            _memory(model, engine, shapes),
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        shapes = self.shapes
        return {
            "max_num_seqs": self.max_num_seqs,
            "num_speculative_tokens": self.num_drafts,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "heads": self.heads,
            "decode_row_capacity": shapes.capacity,
            "decode_regime_bound": decode_regime_bound(shapes.capacity),
            "decode_buckets": [{**dataclasses.asdict(shape), "rows": shape.rows} for shape in shapes.decode],
            "prefill_buckets": list(shapes.prefill),
            "num_blocks": shapes.num_blocks,
            "num_window_pages": shapes.num_window_pages,
            "attention": [dataclasses.asdict(plan) for plan in self.attention],
            "memory_bytes": {**self.memory, "total": sum(self.memory.values())},
        }

    def to_text(self) -> str:
        """The plan as tables to read."""
        shapes, capacity = self.shapes, self.shapes.capacity
        undeclared = "undeclared (no DSpark drafts)"
        lines = [
            f"max_num_seqs {self.max_num_seqs}, K {self.num_drafts}, max_num_batched_tokens "
            f"{self.max_num_batched_tokens}, max_model_len {self.max_model_len}, {self.heads} heads",
            "",
            f"decode row capacity   {undeclared if capacity is None else f'{capacity} rows'}",
            f"decode regime up to   {decode_regime_bound(capacity)} rows",
            "decode buckets        "
            + ", ".join(f"{s.num_seqs} x (1+{s.num_drafts}) = {s.rows}" for s in shapes.decode),
            "prefill buckets       " + ", ".join(map(str, shapes.prefill)) + " tokens",
            "",
        ]
        rows = [("attention", "width", "capacity", "decode plan", "beyond", "partials", "workspace MiB")]
        rows += [
            (
                plan.name,
                str(plan.width),
                "-" if plan.capacity is None else str(plan.capacity),
                f"{plan.decode.num_chunks} x {plan.decode.chunk_size} up to {plan.decode_rows} rows",
                f"{plan.extend.num_chunks} x {plan.extend.chunk_size}",
                str(plan.partials),
                f"{plan.workspace_bytes / MIB:.9f}",
            )
            for plan in self.attention
        ]
        lines += [*_table(rows), ""]
        rows = [("memory", "MiB")]
        memory = {**self.memory, "total": sum(self.memory.values())}
        lines += _table(rows + [(name.replace("_", " "), f"{size / MIB:.1f}") for name, size in memory.items()])
        lines.append(f"({shapes.num_blocks} blocks of 256 tokens, {shapes.num_window_pages} window pages of 64)")
        return "\n".join(lines)


def _attention(
    model: ModelConfig, engine: EngineConfig, shapes: StepShapes, heads: int, top_k: int
) -> Iterable[AttentionPlan]:
    """One plan for each kind of layer the model has, causal and (with a capacity) for draft queries."""
    indexed = {0: 0, 4: top_k, 128: hca_width(engine.max_model_len)}
    windows: list[tuple[str, int, int | None]] = [("causal", model.sliding_window, None)]
    if shapes.capacity is not None:
        windows.append(("DSpark", draft_window_width(model.sliding_window, shapes.num_drafts), shapes.capacity))
    budget = engine.max_num_batched_tokens
    for ratio in sorted({0, *model.compress_ratios}):
        for kind, window, capacity in windows:
            width = window + indexed[ratio]
            options = {"max_chunks": chunk_limit(width), "capacity": capacity}
            bound = decode_regime_bound(capacity)
            yield AttentionPlan(
                f"{'SWA' if not ratio else f'C{ratio}'} {kind}",
                width,
                capacity,
                bound,
                split_plan(bound, width, **options),
                split_plan(bound + 1, width, **options),
                peak_chunks(budget, width, **options),
                workspace_bytes(max_rows=budget, max_num_batched_tokens=budget, width=width, heads=heads, **options),
            )


def _memory(model: ModelConfig, engine: EngineConfig, shapes: StepShapes) -> dict[str, int]:
    """Bytes of everything that lives as long as the engine."""
    layouts = CacheLayouts.create(
        model,
        precision=engine.precision,
        dtype=engine.dtype,
        num_blocks=shapes.num_blocks,
        num_window_pages=shapes.num_window_pages,
        max_num_seqs=engine.max_num_seqs,
        max_rollback=shapes.num_drafts,
        page_style=engine.page_style,
    )
    _, params = abstract_model(model, Policy.create(model, engine.precision, engine.dtype))
    size: collections.Counter[str] = collections.Counter()
    size["parameters"] = sum(map(_num_bytes, parameter_targets(params).values()))
    trunk = jax.eval_shape(lambda: layouts.trunk_caches(model))
    for name, slab in (("window", trunk.window_slab), ("entries", trunk.entries_slab)):
        if slab is not None:
            size[f"{name}_pages"] += _num_bytes(slab)
    groups = {"window": "window_pages", "entries": "entries_pages", "index_entries": "index_pages"}
    for layer in trunk.layers:
        for name, array in layer.items():
            size[groups.get(name, "compressor_state")] += _num_bytes(array)
    if shapes.num_drafts:
        size["draft_window_pages"] = sum(map(_num_bytes, jax.tree.leaves(jax.eval_shape(layouts.draft_caches))))
        size["draft_logits"] = engine.max_num_seqs * shapes.num_drafts * model.vocab_size * 4
    return dict(size)


def _num_bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
