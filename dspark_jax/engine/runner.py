"""The runner: compiles every step at start, then only dispatches what was compiled."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np
from flax import nnx

from dspark_jax import telemetry
from dspark_jax.cache.groups import CacheLayouts
from dspark_jax.config import EngineConfig, ModelConfig
from dspark_jax.engine.buckets import StepShapes, bucket_for
from dspark_jax.engine.scheduler import ScheduledStep, Sequence
from dspark_jax.engine.steps import DecodeBatch, DeviceState, PrefillBatch, StepOutput, StepProgram
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.rows import Rows
from dspark_jax.sampling import RowSampling

logger = logging.getLogger(__name__)

Compiled = Callable[[nnx.State, DeviceState, Any], tuple[DeviceState, StepOutput]]


class CompileAfterReadyError(RuntimeError):
    """Something compiled although every step was compiled at start: a shape escaped the plan."""


@dataclasses.dataclass(frozen=True)
class StepHandle:
    """A dispatched step: who was in it and where its outputs will be. Reading them waits for the device."""

    step: ScheduledStep
    output: StepOutput

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(tokens, num_tokens, num_accepted)`` on the host."""
        return jax.device_get((self.output.tokens, self.output.num_tokens, self.output.num_accepted))


class ModelRunner:
    """Owns parameters and device state of one model and its compiled steps.

    Host arrays are made anew for every step and never written again: an asynchronous transfer (or, on CPU, a zero-copy
    view) may read them long after dispatch.
    """

    def __init__(self, model: DeepseekV4, engine: EngineConfig, shapes: StepShapes):
        self.shapes = shapes
        self.engine = engine
        self.config: ModelConfig = model.config
        graph, self._params = nnx.split(model)
        layouts = CacheLayouts.create(
            model.config,
            precision=engine.precision,
            dtype=engine.dtype,
            num_blocks=shapes.num_blocks,
            num_window_pages=shapes.num_window_pages,
            max_num_seqs=engine.max_num_seqs,
            max_rollback=shapes.num_drafts,
        )
        self.program = StepProgram(
            graph,
            model.config,
            layouts,
            shapes.num_drafts,
            engine.speculative.draft_sampling,
            shapes.max_model_len,
        )
        self._state: DeviceState | None = self.program.init_state()
        # A test instrument (see testing.ForcedDrafter): replaces the drafts of requests about to be verified.
        self.draft_override: Callable[[SequenceOf[Sequence], np.ndarray], np.ndarray] | None = None
        self._decode: dict[int, Compiled] = {}
        self._prefill: dict[int, Compiled] = {}
        self.compiles_after_ready = 0

    # -- warm-up ----------------------------------------------------------------------------------------------------
    def warm_up(self, progress: bool = True) -> None:
        """Compiles every bucket, several at a time. Afterwards only these programs run."""
        jobs: list[tuple[dict[int, Compiled], int, Callable[..., Any], Any]] = [
            (self._prefill, n, self.program.prefill, self._prefill_batch(ScheduledStep(), n))
            for n in self.shapes.prefill
        ]
        jobs += [(self._decode, n, self.program.decode, self._decode_batch((), n)) for n in self.shapes.decode]

        def compile_one(job: tuple[dict[int, Compiled], int, Callable[..., Any], Any]) -> None:
            programs, bucket, step, batch = job
            programs[bucket] = jax.jit(step, donate_argnums=1).lower(self._params, self._state, batch).compile()

        with concurrent.futures.ThreadPoolExecutor(max(1, min(len(jobs), (os.cpu_count() or 1)))) as pool:
            done = concurrent.futures.as_completed([pool.submit(compile_one, job) for job in jobs])
            for future in telemetry.progress(done, description="compiling steps", total=len(jobs), enabled=progress):
                future.result()

    # -- steps ------------------------------------------------------------------------------------------------------
    def dispatch(self, step: ScheduledStep) -> StepHandle:
        """Sends one step to the device and returns without waiting. Raises ``ValueError`` if it exceeds every
        bucket."""
        before = telemetry.compile_count()
        if step.chunks:
            tokens = sum(chunk.length for chunk in step.chunks)
            bucket = bucket_for(tokens, self.shapes.prefill, "prefill tokens")
            output = self._run(self._prefill, bucket, self._prefill_batch(step, bucket))
        else:
            bucket = bucket_for(len(step.decodes), self.shapes.decode, "decode requests")
            if self.draft_override is not None:
                drafts = self.draft_override(step.decodes, np.array(jax.device_get(self.state.drafts)))
                self._state = dataclasses.replace(self.state, drafts=drafts)
            output = self._run(self._decode, bucket, self._decode_batch(step.decodes, bucket))
        compiled = telemetry.compile_count() - before
        if compiled:
            self.compiles_after_ready += compiled
            raise CompileAfterReadyError(f"{compiled} compilations while dispatching bucket {bucket}")
        return StepHandle(step, output)

    def _run(self, programs: dict[int, Compiled], bucket: int, batch: Any) -> StepOutput:
        if bucket not in programs:
            raise CompileAfterReadyError(f"bucket {bucket} was not compiled: call warm_up first")
        state, self._state = self._state, None  # the donated state must not be reachable if the step fails half-way
        if state is None:
            raise RuntimeError("an earlier step failed: the device state is lost and the engine must be rebuilt")
        self._state, output = programs[bucket](self._params, state, batch)
        return output

    def live_device_bytes(self) -> int:
        """Bytes of parameters and state held on the device."""
        return sum(x.nbytes for x in jax.tree.leaves((self._params, self._state)))

    @property
    def state(self) -> DeviceState:
        """The current device state, for inspection. It is donated to the next step: copy what must outlive that."""
        if self._state is None:
            raise RuntimeError("an earlier step failed: the device state is lost")
        return self._state

    # -- batches ----------------------------------------------------------------------------------------------------
    def _tables(self, sequences: SequenceOf[Sequence], size: int) -> tuple[Any, Any]:
        window = np.zeros((size, self.shapes.window_pages), np.int32)
        blocks = np.zeros((size, self.shapes.block_pages), np.int32)
        for i, sequence in enumerate(sequences):
            for logical, page in sequence.window.items():
                window[i, logical % self.shapes.window_pages] = page
            blocks[i, : len(sequence.blocks)] = sequence.blocks
        return window, blocks

    @staticmethod
    def _sampling(sequences: SequenceOf[Sequence], size: int) -> RowSampling:
        return RowSampling.from_params([s.request.sampling for s in sequences], [s.seed for s in sequences], size=size)

    def _decode_batch(self, decodes: SequenceOf[Sequence], size: int) -> DecodeBatch:
        slot: Any = np.full(size, -1, np.int32)
        slot[: len(decodes)] = [s.slot for s in decodes]
        num_drafts: Any = np.full(size, self.shapes.num_drafts, np.int32)
        window, blocks = self._tables(decodes, size)
        return DecodeBatch(
            slot=slot,
            num_drafts=num_drafts,
            window_table=window,
            block_table=blocks,
            sampling=self._sampling(decodes, size),
        )

    def _prefill_batch(self, step: ScheduledStep, size: int) -> PrefillBatch:
        requests = self.shapes.max_prefill_seqs
        # Programs take NumPy arrays where dataclasses declare JAX ones, hence Any.
        per_row: dict[str, Any] = {name: np.zeros(size, np.int32) for name in ("token", "position", "request")}
        next_token: Any = np.full(size, -1, np.int32)
        valid: Any = np.zeros(size, np.bool_)
        per_request: dict[str, Any] = {
            name: np.zeros(requests, np.int32) for name in ("start", "first_row", "num_rows")
        }
        slot: Any = np.full(requests, -1, np.int32)
        anchor: Any = np.full(requests, -1, np.int32)
        finishes: Any = np.zeros(requests, np.bool_)
        row = 0
        for i, chunk in enumerate(step.chunks):
            span, end = slice(row, row + chunk.length), chunk.start + chunk.length
            tokens = chunk.sequence.tokens
            per_row["token"][span] = tokens[chunk.start : end]
            per_row["position"][span] = np.arange(chunk.start, end)
            per_row["request"][span] = i
            following = tokens[chunk.start + 1 : end + 1]
            next_token[row : row + len(following)] = following
            valid[span] = True
            slot[i], anchor[i], finishes[i] = chunk.sequence.slot, chunk.anchor, chunk.finishes
            per_request["start"][i] = chunk.start
            per_request["first_row"][i] = row
            per_request["num_rows"][i] = chunk.length
            row += chunk.length
        sequences = [chunk.sequence for chunk in step.chunks]
        window, blocks = self._tables(sequences, requests)
        rows = Rows(**per_row, valid=valid, slot=slot, **per_request, window_table=window, block_table=blocks)
        return PrefillBatch(rows, next_token, finishes, anchor, self._sampling(sequences, requests))
