"""The scheduler against a stand-in for the device that knows each request's true tokens."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from dspark_jax.engine.buckets import RECOMPUTED_TOKENS, DecodeShape, StepShapes, bucket_for, ladder
from dspark_jax.engine.request import FinishReason, Request
from dspark_jax.engine.scheduler import Phase, Scheduler, Sequence
from dspark_jax.sampling_params import SamplingParams

EOS = 1
WINDOW = 128
MAX_LEN = 1024


def shapes(
    num_drafts: int, max_num_seqs: int, num_blocks: int, budget: int, *, tails: int = 0, max_decode_seqs: int = 99
) -> StepShapes:
    kept = -(-(WINDOW + 1 + RECOMPUTED_TOKENS + 2 * (1 + num_drafts)) // WINDOW_PAGE_TOKENS) + 1
    written = -(-budget // WINDOW_PAGE_TOKENS) + 1
    prefill_seqs = min(max_num_seqs, 8)
    tail_pages = -(-(WINDOW + RECOMPUTED_TOKENS - 1) // WINDOW_PAGE_TOKENS)
    return StepShapes(
        num_drafts=num_drafts,
        capacity=None,
        decode=tuple(DecodeShape(n, num_drafts) for n in ladder(min(max_num_seqs, max_decode_seqs))),
        prefill=ladder(budget),
        max_prefill_seqs=prefill_seqs,
        window_pages=kept + written,
        block_pages=MAX_LEN // BLOCK_TOKENS,
        max_model_len=MAX_LEN,
        num_blocks=num_blocks,
        num_window_pages=1 + max_num_seqs * kept + written + prefill_seqs + tails * tail_pages,
        tail_pages=tail_pages if tails else 0,
    )


class Device:
    """Executes scheduled steps: knows where each slot really is and what every page holds, and checks that whatever a
    request reads was written with its own tokens.

    A row is stood for by a hash of all tokens up to it. Pages hold one row per token (entries are coarser).
    """

    def __init__(self, scheduler: Scheduler, rng: np.random.Generator):
        self.scheduler, self.rng = scheduler, rng
        self.position: dict[int, int] = {}  # slot -> true anchor position
        self.block_rows: dict[tuple[int, int], int] = {}
        self.window_rows: dict[tuple[int, int], int] = {}
        self.state: dict[tuple[int, int], int] = {}  # (slot, position): what the compressors of the slot know
        self._chains: dict[str, list[int]] = {}

    def token(self, sequence: Sequence, position: int) -> int:
        seed = int(sequence.request.request_id)
        value = (seed * 7919 + position * 104729) % 1000 + 2
        return EOS if position == sequence.seed else value

    def chain(self, s: Sequence, position: int) -> int:
        """Hash of the request's true tokens up to ``position``."""
        prompt = s.request.prompt_token_ids
        chain = self._chains.setdefault(s.request.request_id, [])
        for p in range(len(chain), position + 1):
            token = prompt[p] if p < len(prompt) else self.token(s, p)
            chain.append(hash((chain[-1] if chain else 0, token)))
        return chain[position]

    def check_pages(self) -> None:
        running = self.scheduler.running
        for pool, lists in (
            (self.scheduler.blocks, [s.blocks for s in running]),
            (self.scheduler.window_pages, [list(s.window.values()) for s in running]),
        ):
            held = Counter(page for pages in lists for page in pages)
            assert all(len(set(pages)) == len(pages) for pages in lists)
            assert 0 not in held
            assert all(pool.holders(page) == count for page, count in held.items())
            assert pool.num_free + len(held) == pool.capacity
        for s in running:
            ring = [p % self.scheduler.shapes.window_pages for p in s.window]
            assert len(set(ring)) == len(ring), "two live window pages share a table entry"

    def block_row(self, s: Sequence, p: int) -> tuple[int, int]:
        return s.blocks[p // BLOCK_TOKENS], p % BLOCK_TOKENS

    def window_row(self, s: Sequence, p: int) -> tuple[int, int]:
        return s.window[p // WINDOW_PAGE_TOKENS], p % WINDOW_PAGE_TOKENS

    def write(self, s: Sequence, p: int, value: int) -> None:
        if p < s.num_cached:
            return  # computed once more, pages untouched
        block, window = self.block_row(s, p), self.window_row(s, p)
        for page, pool in ((block[0], self.scheduler.blocks), (window[0], self.scheduler.window_pages)):
            assert pool.holders(page) == 1, "a shared page is written"
        self.block_rows[block], self.window_rows[window] = value, value

    def compute(self, s: Sequence, start: int, end: int) -> None:
        """Committed rows ``start .. end - 1``: each writes itself and reads what the model would."""
        for p in range(start, end):
            self.state[s.slot, p] = self.chain(s, p)
            self.write(s, p, self.chain(s, p))
            if p % 4 == 3 and p >= s.num_cached:
                for back in range(min(8, p + 1)):
                    assert self.state[s.slot, p - back] == self.chain(s, p - back), "pooled state of another request"
            for back in (0, 1, WINDOW // 2, WINDOW - 1):
                if back <= p:
                    assert self.window_rows[self.window_row(s, p - back)] == self.chain(s, p - back)
            q = int(self.rng.integers(0, p + 1))
            assert self.block_rows[self.block_row(s, q)] == self.chain(s, q)

    def check_drafter(self, s: Sequence, anchor: int) -> None:
        for p in range(max(0, s.first_valid, anchor - WINDOW), anchor):
            assert self.window_rows[self.window_row(s, p)] == self.chain(s, p), "drafter context of another request"

    def run(self, step):
        self.check_pages()
        k, results = self.scheduler.shapes.num_drafts, []
        assert not (step.chunks and step.decodes)
        assert sum(c.length for c in step.chunks) <= self.scheduler.shapes.prefill[-1]
        assert len(step.decodes) <= self.scheduler.shapes.max_decode_seqs
        for chunk in step.chunks:
            s, end = chunk.sequence, chunk.start + chunk.length
            assert chunk.length > 0
            self.compute(s, chunk.start, end)
            if chunk.finishes:
                self.check_drafter(s, end)
                self.position[s.slot] = end
                results.append((s, [] if chunk.anchor >= 0 else [self.token(s, end)], 0))
                assert chunk.anchor in (-1, self.token(s, end))
        for s in step.decodes:
            true = self.position[s.slot]
            if true == MAX_LEN:  # the step before reached the limit, which the host does not know yet
                results.append((s, [-1], 0))
                continue
            end = min(true + 1 + k, MAX_LEN)
            accepted = int(self.rng.integers(0, end - true))
            self.compute(s, true, true + 1 + accepted)
            for p in range(true + 1 + accepted, end):  # rejected rows leave garbage behind
                self.state[s.slot, p] = -1
                self.write(s, p, -1)
            self.check_drafter(s, true + 1 + accepted)
            results.append((s, [self.token(s, true + 1 + i) for i in range(accepted + 1)], accepted))
            self.position[s.slot] = true + accepted + 1
        return results


def drive(scheduler: Scheduler, device: Device, on_step=lambda: None):
    """The engine's loop: one step is dispatched before the results of the one before are read."""
    out: dict[str, list] = {}
    finished, pending, idle = {}, deque(), 0
    while scheduler.has_work() or pending:
        on_step()
        step = scheduler.schedule()
        if step is not None:
            pending.append((step, device.run(step)))
        idle = 0 if step or pending else idle + 1
        assert idle < 3, "nothing runs although there is work"
        if pending and (step is None or len(pending) > 1):
            step, results = pending.popleft()
            for s in step.decodes:
                s.in_flight -= 1
            for s, tokens, accepted in results:
                if not tokens:
                    continue
                s.awaiting_first = False
                update = scheduler.process(s, tokens, drafted=0, accepted=accepted)
                if update is not None:
                    out.setdefault(update.request_id, []).extend(update.new_token_ids)
                    if update.finish_reason:
                        finished[update.request_id] = update.finish_reason
    return out, finished


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_request_gets_exactly_its_tokens(data):
    k = data.draw(st.integers(0, 7))
    max_num_seqs = data.draw(st.integers(1, 6))
    num_blocks = data.draw(st.integers(MAX_LEN // BLOCK_TOKENS + 1, 10))
    budget = data.draw(st.sampled_from([1 + k, 64, 100, 300]))
    tails, max_decode_seqs = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6))
    scheduler = Scheduler(
        shapes(k, max_num_seqs, num_blocks, budget, tails=tails, max_decode_seqs=max_decode_seqs),
        max_num_seqs=max_num_seqs,
        sliding_window=WINDOW,
        eos_token_id=EOS,
    )
    device = Device(scheduler, np.random.default_rng(data.draw(st.integers(0, 2**32))))
    count = data.draw(st.integers(1, 10))
    sequences = []
    for i in range(count):
        length = data.draw(st.sampled_from([1, 2, 63, 64, 200, 250, 255, 256, 257, 500, 512, 700]))
        eos_at = data.draw(st.sampled_from([MAX_LEN + 1, length, length + 3, length + 30]))
        params = SamplingParams(max_tokens=data.draw(st.sampled_from([1, 2, 40, 300, None])))
        fork = data.draw(st.sampled_from([0, 100, 256, 300, 600]))  # prompts are equal up to here
        prompt = tuple(p if p < fork else 1000 * i + p for p in range(length))
        request = Request(str(i), prompt, params)
        sequences.append(Sequence(request, eos_at, list(request.prompt_token_ids)))
    arrivals, aborted = deque(sequences), set()

    def on_step():
        if arrivals and (not scheduler.has_work() or device.rng.random() < 0.5):
            scheduler.add(arrivals.popleft())
        if device.rng.random() < 0.02:
            victim = sequences[int(device.rng.integers(count))]
            if victim not in arrivals and victim.phase is not Phase.FINISHED:
                scheduler.abort(victim)
                aborted.add(victim.request.request_id)

    scheduler.add(arrivals.popleft())
    out, finished = {}, {}
    while arrivals or scheduler.has_work():
        if not scheduler.has_work():
            scheduler.add(arrivals.popleft())
        more, ends = drive(scheduler, device, on_step)
        for key, tokens in more.items():
            out.setdefault(key, []).extend(tokens)
        finished |= ends

    assert scheduler.blocks.num_free == scheduler.blocks.capacity
    assert scheduler.window_pages.num_free == scheduler.window_pages.capacity
    assert scheduler.slots.num_free == max_num_seqs
    for s in sequences:
        name, n = s.request.request_id, len(s.request.prompt_token_ids)
        want, reason = [], None
        while reason is None:
            want.append(device.token(s, n + len(want)))
            if want[-1] == EOS:
                reason = FinishReason.STOP
            elif len(want) == s.request.sampling.max_tokens or n + len(want) == MAX_LEN:
                reason = FinishReason.LENGTH
        got = out.get(name, [])
        if name in aborted:
            assert got == want[: len(got)]
        else:
            assert (got, finished[name]) == (want, reason)


def test_the_youngest_is_preempted_and_resumes_with_its_anchor():
    scheduler = Scheduler(shapes(3, 2, 5, 256), max_num_seqs=2, sliding_window=WINDOW, eos_token_id=EOS)
    device = Device(scheduler, np.random.default_rng(0))
    # Four usable blocks: both prompts fit, but both cannot grow past three blocks.
    pair = [
        Sequence(Request(str(i), tuple(range(250)), SamplingParams(max_tokens=400)), MAX_LEN + 1, list(range(250)))
        for i in range(2)
    ]
    for s in pair:
        scheduler.add(s)
    out, finished = drive(scheduler, device)
    assert scheduler.num_preemptions >= 1
    assert pair[0].preemptions == 0, "the oldest request is never preempted"
    assert finished == {"0": FinishReason.LENGTH, "1": FinishReason.LENGTH}
    for s in pair:
        assert out[s.request.request_id] == [device.token(s, 250 + i) for i in range(400)]


def test_buckets():
    assert ladder(64) == (1, 2, 4, 8, 16, 32, 64)
    assert ladder(42) == (1, 2, 4, 8, 16, 32, 42)
    assert bucket_for(33, ladder(42), "decode requests") == 42
    with pytest.raises(ValueError, match="decode requests 43 exceed the largest compiled bucket 42"):
        bucket_for(43, ladder(42), "decode requests")
