"""Greedy tokens are the same with and without speculation, alone, in a full batch and under page pressure."""

from __future__ import annotations

import numpy as np
import pytest
from harness import greedy, prompts, requests_for, run

from dspark_jax.engine.request import Request
from dspark_jax.testing import ForcedDrafter, Oracle

NUM_PROMPTS, NUM_TOKENS = 64, 64


@pytest.fixture(scope="module")
def workload():
    return prompts(np.random.default_rng(5), NUM_PROMPTS, 150)


@pytest.fixture(scope="module")
def plain(engines, workload):
    """One request at a time, no speculation."""
    engine = engines(0, max_num_seqs=1)
    return {str(i): run(engine, [Request(str(i), p, greedy(NUM_TOKENS))])[str(i)] for i, p in enumerate(workload)}


@pytest.mark.contract("T12")
@pytest.mark.parametrize("k", [0, None])
def test_a_full_batch_equals_one_request_alone(engines, workload, plain, k):
    engine = engines(k, max_num_seqs=8)
    assert run(engine, requests_for(workload, greedy(NUM_TOKENS))) == plain


@pytest.mark.contract("T12")
def test_speculation_alone(engines, workload, plain):
    engine = engines(None, max_num_seqs=1)
    for i, prompt in enumerate(workload):
        request = Request(str(i), prompt, greedy(NUM_TOKENS))
        assert run(engine, [request])[str(i)] == plain[str(i)]


@pytest.mark.contract("T12")
@pytest.mark.parametrize("k", [0, None])
def test_page_pressure_with_preemptions(engines, plain, workload, k):
    """Few blocks for long outputs: requests are preempted in the middle and computed again."""
    engine = engines(k, max_num_seqs=8, num_blocks=6)
    before = engine.counters()["preemptions"]
    long = {str(i): p for i, p in enumerate(workload) if len(p) > 60}
    requests = [Request(i, p, greedy(NUM_TOKENS + 200)) for i, p in long.items()]
    got = run(engine, requests)
    assert engine.counters()["preemptions"] - before >= 5
    assert {i: tokens[:NUM_TOKENS] for i, tokens in got.items()} == {i: plain[i] for i in long}


@pytest.mark.contract("T12")
@pytest.mark.parametrize("p", [0.0, 0.6, 1.0])
def test_any_acceptance_rate(engines, models, p):
    """Float32 without quantisation against the oracle: whatever is proposed, the oracle's tokens come out."""
    options = {"precision": "exact", "dtype": "float32"}
    engine = engines(None, async_scheduling=False, **options)
    token_lists = prompts(np.random.default_rng(6), 6, 100)
    requests = requests_for(token_lists, greedy(40))
    guess = run(engine, requests)
    oracle = Oracle(models(**options), 256)
    truth = {r.request_id: oracle.generate(r.prompt_token_ids, 40, guess=guess[r.request_id]) for r in requests}
    before = engine.counters()
    try:
        ForcedDrafter(engine, {i: t.tokens for i, t in truth.items()}, p)
        got = run(engine, requests)
    finally:
        engine.runner.draft_override = None
    for i, tokens in got.items():
        different = [k for k, pair in enumerate(zip(tokens, truth[i].tokens, strict=True)) if pair[0] != pair[1]]
        assert not different or truth[i].gaps[different[0]] < 1e-3, f"request {i} at {different[0]}"
    after = engine.counters()
    rounds = after["verified_rounds"] - before["verified_rounds"]
    accepted = [after[f"accepted_at_{k}"] - before[f"accepted_at_{k}"] for k in (1, 2, 3)]
    if p == 1.0:
        assert accepted[2] / rounds > 0.8  # not all: a request's last round runs past the truth that is known
    if p == 0.0:
        assert accepted[0] / rounds < 0.1
    assert accepted == sorted(accepted, reverse=True)
