"""The scheduler: which requests run in the next step, in which slots and pages. Host only, no JAX.

Four verbs: ``add``, ``schedule``, ``process`` (tokens came back) and ``abort``; preemption happens inside ``schedule``.
Results come back one step late, so a request's true length can be ahead of what the host knows by what is in flight;
pages are reserved for the upper bound.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections import deque
from collections.abc import Sequence as SequenceOf

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS, PagePool, SlotPool
from dspark_jax.cache.prefix import BlockNames, CachedBlock, PrefixCache, PrefixHit
from dspark_jax.engine.buckets import RECOMPUTED_TOKENS, StepShapes
from dspark_jax.engine.request import FinishReason, Request, RequestUpdate

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request inside the engine.

    ``tokens`` are prompt and output as far as the host knows. ``num_dispatched`` counts prompt tokens handed to
    prefill steps; ``in_flight`` the decode steps whose results are not back. While decoding, the last known token is
    the anchor: it is sampled but not processed.

    ``num_cached`` tokens came from the prefix cache at admission: their pages are shared, and the drafter's rows before
    ``first_valid`` were not restored. ``num_cached_prompt`` is ``num_cached`` of the first admission. ``(slot,
    generation)`` names this stay in a slot.
    """

    request: Request
    seed: int
    tokens: list[int]
    phase: Phase = Phase.WAITING
    slot: int = -1
    generation: int = 0
    num_dispatched: int = 0
    num_cached: int = 0
    num_cached_prompt: int = 0
    first_valid: int = 0
    in_flight: int = 0
    awaiting_first: bool = False
    blocks: list[int] = dataclasses.field(default_factory=list)
    window: dict[int, int] = dataclasses.field(default_factory=dict)
    preemptions: int = 0
    last_decoded: int = 0
    names: BlockNames = dataclasses.field(default_factory=BlockNames)
    registered: list[CachedBlock | None] = dataclasses.field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def prefill_length(self) -> int:
        """Tokens to process before decoding. A resumed request's last token is its anchor: known, not to be
        processed."""
        return len(self.tokens) - 1 if self.num_output else len(self.tokens)

    @property
    def forced_anchor(self) -> int:
        return self.tokens[-1] if self.num_output else -1

    @property
    def position(self) -> int:
        """Lower bound of the anchor's position, exact when nothing is in flight."""
        return len(self.tokens) - (0 if self.awaiting_first else 1)


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    sequence: Sequence
    start: int
    length: int
    finishes: bool
    anchor: int


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """What the runner executes: either prefill ``chunks`` or ``decodes``, never both.

    So a chunk that happens to have as many tokens as a verification has rows still runs as a chunk.
    """

    chunks: tuple[PrefillChunk, ...] = ()
    decodes: tuple[Sequence, ...] = ()


class Scheduler:
    """First come, first served, with prefill and decode steps taking turns while both have work.

    When blocks run out the youngest running request is preempted: it gives up slot and pages, goes back to the head of
    the queue and is recomputed later from its tokens, so its output does not change. When more requests decode than one
    step holds (``shapes.max_decode_seqs``) they take turns.

    ``same_next_token``: see ``PrefixCache``. There is a prefix cache if ``shapes.tail_pages`` is not 0.
    """

    def __init__(
        self,
        shapes: StepShapes,
        *,
        max_num_seqs: int,
        sliding_window: int,
        eos_token_id: int,
        same_next_token: bool = False,
    ):
        self.shapes = shapes
        self.eos_token_id = eos_token_id
        self.sliding_window = sliding_window
        self.blocks = PagePool("cache blocks", shapes.num_blocks)
        self.window_pages = PagePool("window pages", shapes.num_window_pages)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self.slots = SlotPool(max_num_seqs)
        self.prefix: PrefixCache | None = None
        if shapes.tail_pages:
            self.prefix = PrefixCache(
                self.blocks, self.window_pages, tail_pages=shapes.tail_pages, same_next_token=same_next_token
            )
        self._last_was_prefill = False
        self._num_decode_steps = 0

    # -- verbs ----------------------------------------------------------------------------------------------------
    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a request wherever it is. Steps in flight may still write its old pages, but they run before any step
        that could give those pages to someone else, and their results are dropped."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is not Phase.FINISHED:
            self._leave(sequence)
        sequence.phase = Phase.FINISHED

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or ``None`` if nothing can run before results come back (or there is nothing to do)."""
        self._admit()
        for sequence in self.running:
            self._drop_old_window_pages(sequence)
        decodable = any(s.phase is Phase.DECODE for s in self.running)
        if not (self._last_was_prefill and decodable):
            chunks = self._schedule_prefill()
            if chunks:
                self._last_was_prefill = True
                return ScheduledStep(chunks=chunks)
        decodes = self._schedule_decode()
        if decodes:
            self._last_was_prefill = False
            return ScheduledStep(decodes=decodes)
        while True:
            chunks = self._schedule_prefill()
            if chunks:
                self._last_was_prefill = True
                return ScheduledStep(chunks=chunks)
            if self._results_pending() or len(self.running) < 2:
                return None
            # Prompts hold blocks that each other needs and nothing will free them: the youngest makes way.
            self._preempt(self.running[-1])

    def process(
        self, sequence: Sequence, tokens: SequenceOf[int], *, drafted: int, accepted: int
    ) -> RequestUpdate | None:
        """Takes the tokens that one step committed for a request and applies its stop conditions.

        Returns ``None`` for a request that ended meanwhile: late results are dropped, never delivered to its successor.
        """
        if sequence.phase is Phase.FINISHED:
            return None
        sampling = sequence.request.sampling
        new, reason, stop_token = [], None, None
        for token in tokens:
            new.append(int(token))
            sequence.tokens.append(int(token))
            if (token == self.eos_token_id and not sampling.ignore_eos) or token in sampling.stop_token_ids:
                reason, stop_token = FinishReason.STOP, int(token)
            elif (sampling.max_tokens is not None and sequence.num_output >= sampling.max_tokens) or len(
                sequence.tokens
            ) >= self.shapes.max_model_len:
                reason = FinishReason.LENGTH
            if reason:
                break
        self._register(sequence, sequence.position)
        if reason:
            self._leave(sequence)
            sequence.phase = Phase.FINISHED
        return RequestUpdate(
            sequence.request.request_id,
            tuple(new),
            reason,
            stop_token,
            num_drafted=drafted,
            num_accepted=accepted,
            num_cached_tokens=sequence.num_cached_prompt,
        )

    # -- admission and preemption -----------------------------------------------------------------------------------
    def _admit(self) -> None:
        while self.waiting and self.slots.num_free:
            sequence = self.waiting[0]
            needed = self._blocks_for(min(len(sequence.tokens) + 1 + self.shapes.num_drafts, self.shapes.max_model_len))
            hit, idle = PrefixHit(), 0
            if self.prefix is not None:
                hit = self.prefix.lookup(sequence.tokens, sequence.names, sequence.prefill_length)
                idle = self.prefix.num_idle(hit)
            if needed - len(hit.blocks) > self.blocks.num_free - idle - self._blocks_owed():
                return
            self.waiting.popleft()
            if self.prefix is not None:
                self.prefix.acquire(hit, sequence.prefill_length)
            self._take_over(sequence, hit)
            sequence.slot, sequence.generation = self.slots.acquire()
            sequence.phase = Phase.PREFILL
            self.running.append(sequence)

    def _take_over(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Starts a request after the cached part of its tokens, whose pages it now holds."""
        sequence.blocks, sequence.window = list(hit.blocks), dict(hit.tail)
        sequence.num_cached, sequence.first_valid = hit.num_tokens, hit.first_valid
        sequence.num_dispatched = max(0, hit.num_tokens - RECOMPUTED_TOKENS)
        if not sequence.preemptions:
            sequence.num_cached_prompt = hit.num_tokens
        sequence.registered = []
        node = hit.last
        while node is not None:
            sequence.registered.append(node)
            node = node.parent
        sequence.registered.reverse()
        if hit.num_tokens:
            logger.info(
                "request %s: %d of %d tokens come from the prefix cache",
                sequence.request.request_id,
                hit.num_tokens,
                sequence.prefill_length,
            )

    def _register(self, sequence: Sequence, length: int) -> None:
        """Makes the blocks below ``length`` findable: their tokens are known, and computed by steps that run before any
        that is still to be planned."""
        if self.prefix is None:
            return
        registered = sequence.registered
        for index in range(len(registered), length // BLOCK_TOKENS):
            parent = registered[-1] if registered else None
            block = sequence.blocks[index]
            registered.append(
                self.prefix.register(sequence.tokens, sequence.names, index, parent, block, sequence.window)
            )

    def _blocks_owed(self) -> int:
        """Blocks that admitted prompts still need: they were promised at admission."""
        return sum(
            max(0, self._blocks_for(s.prefill_length) - len(s.blocks)) for s in self.running if s.phase is Phase.PREFILL
        )

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        # Last blocks first, so that of kept ones the ends of long prompts are evicted before their beginnings.
        self.blocks.release(reversed(sequence.blocks))
        self.window_pages.release(page for _, page in sorted(sequence.window.items()))
        sequence.blocks, sequence.window = [], {}
        self.slots.release(sequence.slot)
        sequence.slot = -1

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.phase = Phase.WAITING
        sequence.num_dispatched = 0
        sequence.awaiting_first = False
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    # -- pages ------------------------------------------------------------------------------------------------------
    @staticmethod
    def _blocks_for(length: int) -> int:
        return -(-length // BLOCK_TOKENS)

    def _drop_old_window_pages(self, sequence: Sequence) -> None:
        position = sequence.position if sequence.phase is Phase.DECODE else sequence.num_dispatched
        # The drafter reads one position further back than the trunk: sliding_window rows before the anchor.
        oldest = max(position - self.sliding_window, 0) // WINDOW_PAGE_TOKENS
        for page in [p for p in sequence.window if p < oldest]:
            self.window_pages.release([sequence.window.pop(page)])

    def _reserve(self, sequence: Sequence, start: int, end: int) -> bool:
        """Pages for positions below ``end`` (window pages from ``start``). False, with nothing taken, if blocks run
        out."""
        missing = self._blocks_for(end) - len(sequence.blocks)
        if missing > self.blocks.num_free:
            return False
        if missing > 0:
            sequence.blocks += self.blocks.allocate(missing)
        pages = range(start // WINDOW_PAGE_TOKENS, (end - 1) // WINDOW_PAGE_TOKENS + 1)
        for page in pages:
            if page not in sequence.window:
                sequence.window[page] = self.window_pages.allocate(1)[0]
        return True

    # -- building steps ---------------------------------------------------------------------------------------------
    def _schedule_prefill(self) -> tuple[PrefillChunk, ...]:
        budget, chunks = self.shapes.prefill[-1], []
        for sequence in self.running:
            if len(chunks) == self.shapes.max_prefill_seqs or budget == 0:
                break
            if sequence.phase is not Phase.PREFILL:
                continue
            start = sequence.num_dispatched
            length = min(sequence.prefill_length - start, budget)
            if not self._reserve(sequence, start, start + length):
                break  # decodes took the blocks since admission: wait for some to end or be preempted
            finishes = start + length == sequence.prefill_length
            chunks.append(PrefillChunk(sequence, start, length, finishes, sequence.forced_anchor if finishes else -1))
            sequence.num_dispatched += length
            budget -= length
            self._register(sequence, sequence.num_dispatched)
            if finishes:
                sequence.phase = Phase.DECODE
                sequence.awaiting_first = not sequence.num_output
        return tuple(chunks)

    def _schedule_decode(self) -> tuple[Sequence, ...]:
        decodes: list[Sequence] = []
        candidates = [s for s in self.running if s.phase is Phase.DECODE and self._may_continue(s)]
        # More than one step holds: those that have waited longest go first (the sort keeps the order of admission).
        if len(candidates) > self.shapes.max_decode_seqs:
            candidates = sorted(candidates, key=lambda s: s.last_decoded)[: self.shapes.max_decode_seqs]
        for sequence in candidates:
            if sequence.phase is not Phase.DECODE:
                continue  # preempted for an earlier one
            width = 1 + self.shapes.num_drafts
            upper = sequence.position + sequence.in_flight * width
            end = min(upper + width, self.shapes.max_model_len)
            while not self._reserve(sequence, sequence.position, end):
                if self._results_pending():
                    return ()  # results on their way may free pages, and a preempted request must know its tokens
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                decodes.append(sequence)
        decodes = [s for s in decodes if s.phase is Phase.DECODE]
        self._num_decode_steps += 1
        for sequence in decodes:
            sequence.in_flight += 1
            sequence.last_decoded = self._num_decode_steps
        return tuple(decodes)

    def _results_pending(self) -> bool:
        return any(s.in_flight or s.awaiting_first for s in self.running)

    def _may_continue(self, sequence: Sequence) -> bool:
        """Whether another step can still matter: each step in flight commits at least one token."""
        sampling = sequence.request.sampling
        pending = sequence.in_flight + sequence.awaiting_first
        longest = len(sequence.tokens) + pending
        if sampling.max_tokens is not None and sequence.num_output + pending >= sampling.max_tokens:
            return False
        return longest < self.shapes.max_model_len
