"""The runner: compiles every step at start, then only dispatches what was compiled."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
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
from dspark_jax.engine.buckets import DecodeShape, StepShapes, bucket_for, is_uniform_verify
from dspark_jax.engine.scheduler import ScheduledStep, Sequence
from dspark_jax.engine.steps import DecodeBatch, DeviceState, PrefillBatch, StepOutput, StepProgram
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.rows import Rows
from dspark_jax.sampling import RowSampling
from dspark_jax.spec_decode.capacity import check_decode_rows
from dspark_jax.spec_decode.staging import DraftCapacities
from pallas_kernels._dispatch import describe_choices

logger = logging.getLogger(__name__)

Compiled = Callable[[nnx.State, DeviceState, Any], tuple[DeviceState, StepOutput]]


class CompileAfterReadyError(RuntimeError):
    """Something compiled although every step was compiled at start: a shape escaped the plan."""


@dataclasses.dataclass(frozen=True)
class StepHandle:
    """A dispatched step: who was in it and where its outputs will be. Reading them waits for the device."""

    step: ScheduledStep
    output: StepOutput

    def read(self) -> StepOutput:
        """The outputs on the host, as NumPy arrays."""
        return jax.device_get(self.output)


class ModelRunner:
    """Owns parameters and device state of one model and its compiled steps.

    The device state is donated to every step and never leaves this object: ``snapshot`` gives copies. Without
    ``allocate`` (and with the abstract model of ``nnx.eval_shape``) there are no arrays, only steps to ``lower``.
    """

    def __init__(
        self,
        model: DeepseekV4,
        engine: EngineConfig,
        shapes: StepShapes,
        capacities: DraftCapacities,
        *,
        allocate: bool = True,
    ):
        self.shapes = shapes
        self.capacities = capacities
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
            page_style=engine.page_style,
        )
        self.program = StepProgram(
            graph,
            model.config,
            layouts,
            shapes.num_drafts,
            engine.speculative.draft_sampling,
            shapes.max_model_len,
        )
        init = self.program.init_state
        self._state: DeviceState | None = init() if allocate else jax.eval_shape(init)
        # A test instrument (see testing.ForcedDrafter): replaces the drafts of requests about to be verified.
        self.draft_override: Callable[[SequenceOf[Sequence], np.ndarray], np.ndarray] | None = None
        self._programs: dict[DecodeShape | int, Compiled] = {}
        self.compiles_after_ready = 0

    # -- warm-up ----------------------------------------------------------------------------------------------------
    def warm_up(self, progress: bool = True) -> None:
        """Compiles every bucket, several at a time. Afterwards only these programs run."""
        jobs: list[DecodeShape | int] = [*self.shapes.prefill, *self.shapes.decode]

        def compile_one(bucket: DecodeShape | int) -> None:
            self._programs[bucket] = self.lower(bucket).compile()

        with concurrent.futures.ThreadPoolExecutor(max(1, min(len(jobs), (os.cpu_count() or 1)))) as pool:
            done = concurrent.futures.as_completed([pool.submit(compile_one, job) for job in jobs])
            for future in telemetry.progress(done, description="compiling steps", total=len(jobs), enabled=progress):
                future.result()
        for line in describe_choices():
            logger.info("kernels: %s", line)

    def lower(self, bucket: DecodeShape | int) -> jax.stages.Lowered:
        """The step of a decode shape, or of that many prefill tokens, before XLA compiles it."""
        if isinstance(bucket, DecodeShape):
            step = functools.partial(self.program.decode, depth=bucket.num_drafts)
            batch = self._decode_batch((), bucket.num_seqs)
        else:
            step, batch = self.program.prefill, self._prefill_batch(ScheduledStep(), bucket)
        return jax.jit(step, donate_argnums=1).lower(self._params, self._state, batch)

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    # -- steps ------------------------------------------------------------------------------------------------------
    def dispatch(self, step: ScheduledStep) -> StepHandle:
        """Sends one step to the device and returns without waiting.

        Raises ``ValueError`` before anything is sent if the step exceeds what was planned and compiled.
        """
        before = telemetry.compile_count()
        bucket = self.bucket(step)
        if isinstance(bucket, DecodeShape):
            if self.draft_override is not None:
                drafts = self.draft_override(step.decodes, np.array(jax.device_get(self._held_state().drafts)))
                self._state = dataclasses.replace(self._held_state(), drafts=drafts)
            output = self._run(bucket, self._decode_batch(step.decodes, bucket.num_seqs))
        else:
            output = self._run(bucket, self._prefill_batch(step, bucket))
        compiled = telemetry.compile_count() - before
        if compiled:
            self.compiles_after_ready += compiled
            raise CompileAfterReadyError(f"{compiled} compilations while dispatching bucket {bucket}")
        return StepHandle(step, output)

    def bucket(self, step: ScheduledStep) -> DecodeShape | int:
        """The compiled program for a step: a decode shape, or a number of prefill tokens.

        Raises ``ValueError`` if the step has more rows than the declared capacity or than any program holds.
        """
        rows = [chunk.length for chunk in step.chunks]
        shape = None
        if step.decodes:
            shape = self.shapes.decode_shape(len(step.decodes))
            rows += [1 + shape.num_drafts] * len(step.decodes)
        prefilling = [True] * len(step.chunks) + [False] * len(step.decodes)
        if shape is not None and is_uniform_verify(rows, prefilling, 1 + shape.num_drafts):
            check_decode_rows("decode", sum(rows), self.shapes.capacity)
            return shape
        if step.decodes:
            raise ValueError("a step holds either chunks of prompts or verifications, got both")
        check_decode_rows("extend", sum(rows), self.shapes.capacity)
        return bucket_for(sum(rows), self.shapes.prefill, "prefill tokens")

    def _run(self, bucket: DecodeShape | int, batch: Any) -> StepOutput:
        if bucket not in self._programs:
            raise CompileAfterReadyError(f"{bucket} was not compiled: call warm_up first")
        # A transfer may read host arrays long after dispatch (on a CPU the program reads them in place), so it gets a
        # private copy that nobody can write to.
        batch = jax.tree.map(np.array, batch)
        state, self._state = self._held_state(), None  # must not be reachable if the step fails half-way
        self._state, output = self._programs[bucket](self._params, state, batch)
        return output

    def live_device_bytes(self) -> int:
        """Bytes of parameters and state held on the device."""
        return sum(x.nbytes for x in jax.tree.leaves((self._params, self._state)))

    def snapshot(self) -> DeviceState:
        """A copy of the device state on the host (NumPy arrays), after every step dispatched so far."""
        return jax.tree.map(np.array, jax.device_get(self._held_state()))

    def _held_state(self) -> DeviceState:
        if self._state is None:
            raise RuntimeError("an earlier step failed: the device state is lost and the engine must be rebuilt")
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
        num_drafts: Any = np.zeros(size, np.int32)
        num_drafts[: len(decodes)] = [self.capacities.get(s.slot, s.generation) for s in decodes]
        first_valid: Any = np.zeros(size, np.int32)
        first_valid[: len(decodes)] = [s.first_valid for s in decodes]
        window, blocks = self._tables(decodes, size)
        return DecodeBatch(
            slot=slot,
            num_drafts=num_drafts,
            first_valid=first_valid,
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
            name: np.zeros(requests, np.int32)
            for name in ("start", "first_row", "num_rows", "write_from", "first_valid")
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
            per_request["write_from"][i] = chunk.sequence.num_cached
            per_request["first_valid"][i] = chunk.sequence.first_valid
            row += chunk.length
        sequences = [chunk.sequence for chunk in step.chunks]
        window, blocks = self._tables(sequences, requests)
        rows = Rows(**per_row, valid=valid, slot=slot, **per_request, window_table=window, block_table=blocks)
        return PrefillBatch(rows, next_token, finishes, anchor, self._sampling(sequences, requests))
