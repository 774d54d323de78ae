"""Requests' lives: limits, stops, aborts, seeds and errors."""

from __future__ import annotations

import numpy as np
import pytest
from harness import greedy, idle, prompts, run

from dspark_jax.engine.buckets import DecodeShape
from dspark_jax.engine.plan import EnginePlan
from dspark_jax.engine.request import FinishReason, Request, RequestError
from dspark_jax.engine.runner import CompileAfterReadyError
from dspark_jax.sampling_params import SamplingParams

PRESSED = {"max_num_seqs": 4, "num_blocks": 5}  # the engine of the parity test


def finish(engine, request):
    engine.add_request(request)
    updates = []
    while engine.has_work():
        updates += engine.step()
    return updates


def test_limits_and_stop_tokens(engines, rng):
    engine = engines(None, **PRESSED)
    (prompt,) = prompts(rng, 1, 40)
    tokens = run(engine, [Request("a", prompt, greedy(20))])["a"]
    assert len(tokens) == 20
    assert run(engine, [Request("a", prompt, greedy(1))])["a"] == tokens[:1]
    stop = tokens[7]
    first = tokens.index(stop)
    updates = finish(engine, Request("a", prompt, greedy(20, stop_token_ids=(stop,))))
    assert updates[-1].finish_reason is FinishReason.STOP
    assert updates[-1].stop_token_id == stop
    assert sum((u.new_token_ids for u in updates), ()) == tokens[: first + 1]
    long = tuple(range(8, 308)) + tuple(range(8, 210))
    updates = finish(engine, Request("a", long, greedy(None)))
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert sum(len(u.new_token_ids) for u in updates) == engine.max_model_len - len(long)
    idle(engine)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [((), "empty"), ((5,) * 512, "512 tokens"), ((5, 320), "320 is outside the vocabulary"), ((-1,), "-1 is outside")],
)
def test_prompts_that_cannot_be_served(engines, prompt, message):
    engine = engines(None, **PRESSED)
    with pytest.raises(RequestError, match=message) as error:
        engine.add_request(Request("a", prompt))
    assert error.value.parameter == "prompt"
    assert not engine.has_work()


def test_abort_in_every_phase_frees_everything(engines, rng):
    engine = engines(None, **PRESSED)
    for steps in range(8):
        for i, prompt in enumerate(prompts(rng, 7, 150)):
            engine.add_request(Request(str(i), prompt, greedy(50)))
        for _ in range(steps):
            engine.step()
        for i in range(7):
            engine.abort(str(i))
            engine.abort("unknown")
        while engine.has_work():
            assert engine.step() == []
        idle(engine)


@pytest.mark.contract("T10")
def test_a_seed_gives_the_same_tokens_in_any_batch(engines, rng):
    engine = engines(None, **PRESSED)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True)
    (prompt, *others) = prompts(rng, 6, 60)
    alone = run(engine, [Request("x", prompt, sampling)])["x"]
    noise = SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True)
    batch = [Request(f"o{i}", p, noise) for i, p in enumerate(others)]
    assert run(engine, [*batch[:3], Request("y", prompt, sampling), *batch[3:]])["y"] == alone
    assert run(engine, [Request("x", prompt, sampling, choice=1)])["x"] != alone
    assert run(engine, [Request("x", prompt, SamplingParams(seed=12, max_tokens=30, ignore_eos=True))])["x"] != alone


def test_a_shape_that_was_not_planned_is_an_error(engines):
    engine = engines(0, **PRESSED)
    shape = DecodeShape(PRESSED["max_num_seqs"], 0)
    program = engine.runner._programs.pop(shape)
    try:
        with pytest.raises(CompileAfterReadyError, match=r"DecodeShape\(num_seqs=\d, num_drafts=0\) was not compiled"):
            finish(engine, Request("a", (9, 9), greedy(4)))
    finally:
        engine.runner._programs[shape] = program
        engine.abort("a")
    while engine.has_work():
        engine.step()


def test_first_token_follows_the_target_law(engines):
    """Sampled engine output against the law computed by hand: one prompt, many seeds.

    Chi-square over the 12 most likely tokens and the rest, 600 draws; false alarms: 1e-4.
    """
    from scipy import stats

    from dspark_jax.testing import Session

    engine = engines(None, **PRESSED)
    prompt = (20, 30, 40, 50, 60)
    count = 600
    sampling = [SamplingParams(temperature=0.7, seed=s, max_tokens=2, ignore_eos=True) for s in range(count)]
    got = run(engine, [Request(str(s), prompt, p) for s, p in enumerate(sampling)])
    session = Session(engine_model(engine), 256)
    logits = session.extend(prompt).logits[-1].astype(np.float64) / 0.7
    law = np.exp(logits - logits.max())
    law /= law.sum()
    top = np.argsort(-law)[:12]
    observed = np.array([sum(t[0] == token for t in got.values()) for token in top])
    expected = count * law[top]
    observed, expected = np.append(observed, count - observed.sum()), np.append(expected, count - expected.sum())
    keep = expected >= 5
    observed = np.append(observed[keep], observed[~keep].sum())
    expected = np.append(expected[keep], expected[~keep].sum())
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-4


def test_the_plan_knows_the_bytes(engines):
    """What ``dspark-jax plan`` says of parameters and caches is what the engine then holds, but for a few counters."""
    engine = engines(None, **PRESSED)
    plan = EnginePlan.create(engine.model_config, engine.config)
    slots, k = engine.config.max_num_seqs, engine.shapes.num_drafts
    counters = slots * 4 * (3 + 2 * k)  # anchor, position, number of drafts; drafts, confidences
    assert engine.counters()["live_device_bytes"] == sum(plan.memory.values()) + counters
    assert plan.shapes == engine.shapes


def engine_model(engine):
    from flax import nnx

    return nnx.merge(engine.runner.program.graph, engine.runner._params)
