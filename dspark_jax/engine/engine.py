"""The engine: queues requests, runs steps, hands back tokens."""

from __future__ import annotations

import logging
from collections import deque

import numpy as np

from dspark_jax.config import EngineConfig
from dspark_jax.engine.buckets import StepShapes
from dspark_jax.engine.request import Request, RequestError, RequestUpdate, check_prompt
from dspark_jax.engine.runner import ModelRunner, StepHandle
from dspark_jax.engine.scheduler import Scheduler, Sequence
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.spec_decode.staging import DraftCapacities

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over compiled steps (implements ``request.EngineCore``).

    One step is dispatched before the results of the one before are read, so the device does not wait for the host.
    Not thread-safe: one thread drives it (``AsyncEngine`` does so for servers).
    """

    def __init__(self, model: DeepseekV4, config: EngineConfig, *, progress: bool = True):
        self.config = config
        self.model_config = model.config
        self.shapes = StepShapes.create(model.config, config)
        self.scheduler = Scheduler(
            self.shapes,
            max_num_seqs=config.max_num_seqs,
            sliding_window=model.config.sliding_window,
            eos_token_id=model.config.eos_token_id,
            same_next_token=model.config.draft_kind == "mtp",
        )
        self._log_plan()
        self.capacities = DraftCapacities(self.scheduler.slots, self.shapes.num_drafts)
        self.runner = ModelRunner(model, config, self.shapes, self.capacities)
        self.runner.warm_up(progress)
        self._seeds = np.random.default_rng(config.seed)
        self._live: dict[str, Sequence] = {}
        self._pending: deque[StepHandle] = deque()
        k = self.shapes.num_drafts
        self._accepted_per_position = np.zeros(k, np.int64)
        self._verified_rounds = 0
        self._tokens_out = 0

    # -- EngineCore -------------------------------------------------------------------------------------------------
    @property
    def max_model_len(self) -> int:
        return self.shapes.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def eos_token_id(self) -> int:
        return self.model_config.eos_token_id

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises ``RequestError`` naming the parameter if it can never be served."""
        check_prompt(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is already in use", "request_id")
        sequence = Sequence(request, self._request_seed(request), list(request.prompt_token_ids))
        self._live[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        sequence = self._live.pop(request_id, None)
        if sequence is not None:
            self.scheduler.abort(sequence)

    def has_work(self) -> bool:
        return bool(self._pending) or self.scheduler.has_work()

    def step(self) -> list[RequestUpdate]:
        """Dispatches the next step, then processes the one before it (its own, without ``async_scheduling``)."""
        step = self.scheduler.schedule()
        if step is not None:
            self.capacities.flush()
            self._pending.append(self.runner.dispatch(step))
        keep = 1 if self.config.async_scheduling and step is not None else 0
        if len(self._pending) > keep:
            return self._process(self._pending.popleft())
        return []

    def counters(self) -> dict[str, float]:
        """Current figures. ``accepted_at_k`` counts rounds that accepted at least k drafts."""
        scheduler = self.scheduler
        values: dict[str, float] = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_pages": scheduler.blocks.num_free,
            "total_pages": scheduler.blocks.capacity,
            "free_window_pages": scheduler.window_pages.num_free,
            "preemptions": scheduler.num_preemptions,
            "compiles_after_ready": self.runner.compiles_after_ready,
            "live_device_bytes": self.runner.live_device_bytes(),
            "compiled_programs": self.runner.num_programs,
            "generated_tokens": self._tokens_out,
            "verified_rounds": self._verified_rounds,
        }
        prefix = scheduler.prefix
        values["prefix_query_tokens"] = 0 if prefix is None else prefix.num_query_tokens
        values["prefix_hit_tokens"] = 0 if prefix is None else prefix.num_hit_tokens
        values["prefix_hits"] = 0 if prefix is None else prefix.num_hits
        values["prefix_cached_blocks"] = 0 if prefix is None else prefix.num_cached_blocks
        values["prefix_evictions"] = 0 if prefix is None else prefix.num_evictions
        for k, accepted in enumerate(self._accepted_per_position, start=1):
            values[f"accepted_at_{k}"] = int(accepted)
        return values

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix. Requests in progress are not affected."""
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.clear()

    # -- internals --------------------------------------------------------------------------------------------------
    def _log_plan(self) -> None:
        shapes, model = self.shapes, self.model_config
        logger.info(
            "verifications of %s rows at most; decode buckets %s; prefill buckets %s tokens; %d blocks of 256 tokens",
            "any number of" if shapes.capacity is None else shapes.capacity,
            ", ".join(f"{s.num_seqs} x (1+{s.num_drafts})" for s in shapes.decode),
            ", ".join(map(str, shapes.prefill)),
            shapes.num_blocks,
        )
        if model.draft_kind == "dspark" and shapes.num_drafts > model.dspark_block_size:
            logger.warning(
                "num_speculative_tokens %d is more than the block of %d that this drafter was trained with: the last "
                "drafts are rarely accepted",
                shapes.num_drafts,
                model.dspark_block_size,
            )

    def _request_seed(self, request: Request) -> int:
        """64 bits that key every random draw of the request: a function of its own seed and choice, or drawn anew."""
        seed = request.sampling.seed
        entropy = int(self._seeds.integers(2**63)) if seed is None else seed % 2**64
        low, high = np.random.SeedSequence([entropy, request.choice]).generate_state(2)
        return int(low) | int(high) << 32

    def _process(self, handle: StepHandle) -> list[RequestUpdate]:
        out = handle.read()
        tokens, counts, accepted, verified = out.tokens, out.num_tokens, out.num_accepted, out.num_verified
        updates = []
        for i, chunk in enumerate(handle.step.chunks):
            # A resumed request's anchor was known and delivered before it was preempted.
            if chunk.finishes and chunk.anchor < 0:
                chunk.sequence.awaiting_first = False
                updates.append(self._deliver(chunk.sequence, tokens[i, :1].tolist(), 0, 0))
        for i, sequence in enumerate(handle.step.decodes):
            sequence.in_flight -= 1
            self._verified_rounds += 1
            self._accepted_per_position[: accepted[i]] += 1
            updates.append(self._deliver(sequence, tokens[i, : counts[i]].tolist(), int(verified[i]), int(accepted[i])))
        return [update for update in updates if update is not None]

    def _deliver(self, sequence: Sequence, tokens: list[int], drafted: int, accepted: int) -> RequestUpdate | None:
        update = self.scheduler.process(sequence, tokens, drafted=drafted, accepted=accepted)
        if update is not None:
            self._tokens_out += len(update.new_token_ids)
            if update.finish_reason is not None:
                self._live.pop(sequence.request.request_id, None)
        return update
