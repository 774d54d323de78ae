"""Greedy tokens are the same with and without speculation, alone, in a full batch and under page pressure."""

from __future__ import annotations

import numpy as np
import pytest
from harness import greedy, prompts, requests_for, run

from dspark_jax.engine.request import Request
from dspark_jax.testing import ForcedDrafter, Oracle


def check_parity(engines, *, num_prompts, num_tokens, max_num_seqs, num_blocks):
    """Every way of running a prompt gives the tokens of the plainest: no speculation, alone."""
    workload = prompts(np.random.default_rng(5), num_prompts, 150)
    sampling = greedy(num_tokens)
    plain_engine, speculative = (engines(k, max_num_seqs=max_num_seqs, num_blocks=num_blocks) for k in (0, None))
    plain = {}
    for i, prompt in enumerate(workload):
        plain |= run(plain_engine, [Request(str(i), prompt, sampling)])
    for engine in (plain_engine, speculative):
        assert run(engine, requests_for(workload, sampling)) == plain
    for i, prompt in enumerate(workload):
        assert run(speculative, [Request(str(i), prompt, sampling)])[str(i)] == plain[str(i)]
    # Outputs so long that the blocks run out: requests are preempted in the middle and computed again.
    long = {str(i): prompt for i, prompt in enumerate(workload) if len(prompt) > 60}
    requests = [Request(i, prompt, greedy(200 + num_tokens)) for i, prompt in long.items()]
    for engine in (plain_engine, speculative):
        before = engine.counters()["preemptions"]
        got = run(engine, requests)
        assert engine.counters()["preemptions"] - before >= 2
        assert {i: tokens[:num_tokens] for i, tokens in got.items()} == {i: plain[i] for i in long}


@pytest.mark.contract("T12")
def test_speculation_batching_and_preemption_change_nothing(engines):
    check_parity(engines, num_prompts=8, num_tokens=24, max_num_seqs=4, num_blocks=5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.contract("T12")
def test_64_prompts_of_64_tokens(engines):
    check_parity(engines, num_prompts=64, num_tokens=64, max_num_seqs=8, num_blocks=6)


@pytest.mark.contract("T12")
def test_any_acceptance_rate(engines, models):
    """Float32 without quantisation against the oracle: whatever is proposed, the oracle's tokens come out."""
    options = {"precision": "exact", "dtype": "float32"}
    engine = engines(None, async_scheduling=False, max_num_seqs=2, **options)
    token_lists = prompts(np.random.default_rng(6), 6, 100)
    requests = requests_for(token_lists, greedy(40))
    guess = run(engine, requests)
    oracle = Oracle(models(**options), 256)
    truth = {r.request_id: oracle.generate(r.prompt_token_ids, 40, guess=guess[r.request_id]) for r in requests}
    for p in (0.0, 0.6, 1.0):
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
        assert accepted == sorted(accepted, reverse=True)
        if p == 1.0:
            assert accepted[2] / rounds > 0.8  # not all: a request's last round runs past the truth that is known
        if p == 0.0:
            assert accepted[0] / rounds < 0.1


def test_mtp_checkpoint(engines):
    """The same trunk with an MTP block: one draft a step, the same tokens."""
    workload = prompts(np.random.default_rng(7), 4, 60)
    requests = requests_for(workload, greedy(24))
    engine = engines(None, draft="mtp", max_num_seqs=2, max_num_batched_tokens=32)
    assert engine.shapes.num_drafts == 1
    assert run(engine, requests) == run(engines(0, max_num_seqs=4, num_blocks=5), requests)
