"""A long random life: nothing leaks, nothing compiles, nobody gets another's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from harness import greedy, idle, prompts, run

from dspark_jax import telemetry
from dspark_jax.engine.request import Request
from dspark_jax.sampling_params import SamplingParams

LONGEST = 40


def workload(rng, count):
    """``count`` requests over some 150 prompts, half of which begin like another: ``[(prompt number, request)]``."""
    trunks = [tuple(rng.integers(8, 320, 400).tolist()) for _ in range(4)]
    token_lists = prompts(rng, 75, 100)
    for i in range(75):
        cut = int(rng.choice([60, 225, 240, 255, 256, 257, 300, 390]))
        token_lists.append(trunks[i % 4][:cut] + prompts(rng, 1, 12)[0])
    requests = []
    for i in range(count):
        number = int(rng.integers(len(token_lists)))
        temperature = 0.0 if rng.random() < 0.6 else float(rng.uniform(0.3, 1.2))
        seed = None if rng.random() < 0.5 else int(rng.integers(1000))
        length = int(rng.integers(1, LONGEST + 1))
        sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=seed, max_tokens=length, ignore_eos=True)
        requests.append((number, Request(str(i), token_lists[number], sampling)))
    return token_lists, requests


def check_soak(engines, count, **sizes):
    """Runs ``count`` requests and checks them. Returns what befell them (counts): with few requests chance decides."""
    rng = np.random.default_rng(2)
    engine, plain = engines(None, **sizes), engines(0, max_num_seqs=1, num_blocks=3)
    engine.reset_prefix_cache()
    token_lists, requests = workload(rng, count)
    truth = {}
    for number in sorted({number for number, _ in requests}):
        truth |= run(plain, [Request(str(number), token_lists[number], greedy(LONGEST))])
    before, compiles = engine.counters(), telemetry.compile_count()
    arrivals, aborted, got, ended = list(reversed(requests)), set(), {}, set()
    while arrivals or engine.has_work():
        # Bursts and lulls; one request in ten is given up at some time.
        waiting = len(engine.scheduler.waiting)
        for _ in range(int(rng.choice([0, 0, 0, 1, 6])) if waiting < 12 else 0):
            if arrivals:
                _, request = arrivals.pop()
                got[request.request_id] = []
                engine.add_request(request)
        if engine._live and rng.random() < 0.02:
            request_id = str(rng.choice(list(engine._live)))
            engine.abort(request_id)
            aborted.add(request_id)
        for update in engine.step():
            assert update.request_id not in ended | aborted, "an update after the end"
            got[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                ended.add(update.request_id)
    after = engine.counters()
    assert len(got) == count
    assert ended | aborted == set(got)
    assert not ended & aborted
    # Nothing is left: no page, no slot, no reference, no request.
    idle(engine)
    scheduler = engine.scheduler
    assert scheduler.slots.num_free == engine.config.max_num_seqs
    assert not scheduler.blocks._holders
    assert not scheduler.window_pages._holders
    assert not engine._live
    assert not engine._pending
    engine.reset_prefix_cache()
    for pool in (scheduler.blocks, scheduler.window_pages):
        assert pool.num_kept == 0
        assert len(pool._free) == pool.capacity
    assert after["live_device_bytes"] == before["live_device_bytes"]
    # Nothing compiled.
    assert telemetry.compile_count() == compiles
    assert after["compiles_after_ready"] == 0
    num_greedy = 0
    for number, request in requests:
        tokens, sampling = tuple(got[request.request_id]), request.sampling
        if request.request_id in ended:
            assert len(tokens) == sampling.max_tokens
        if sampling.temperature == 0:
            num_greedy += request.request_id in ended
            assert tokens == truth[str(number)][: len(tokens)], f"request {request.request_id}"
    assert num_greedy > count / 3
    # Sampled requests with a seed are what they are alone, too.
    seeded = [r for _, r in requests if r.sampling.temperature and r.sampling.seed is not None]
    for request in [r for r in seeded if r.request_id in ended][:: max(1, len(seeded) // 20)]:
        assert run(engine, [request])[request.request_id] == tuple(got[request.request_id])
    events = ("preemptions", "prefix_evictions", "prefix_hits")
    return {"aborted": len(aborted), **{name: after[name] - before[name] for name in events}}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.contract("SOAK")
def test_2000_random_requests(engines):
    # Eight requests share five blocks of 256 tokens: pages are short all the time.
    events = check_soak(engines, 2000, max_num_seqs=8, num_blocks=6)
    assert events["aborted"] > 2000 / 100
    assert events["prefix_hits"] > 2000 / 50
    assert events["preemptions"] > 0
    assert events["prefix_evictions"] > 0


def test_50_random_requests(engines):
    check_soak(engines, 50, max_num_seqs=4, num_blocks=5)
