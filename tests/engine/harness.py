"""Running requests through an engine."""

from __future__ import annotations

from dspark_jax.engine.request import Request
from dspark_jax.sampling_params import SamplingParams


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompts(rng, count, longest, vocab=320):
    return [tuple(rng.integers(8, vocab, rng.integers(1, longest + 1)).tolist()) for _ in range(count)]


def run(engine, requests, max_steps=100_000):
    """Tokens by request id. Everything must end, and every page and slot must come back."""
    before = engine.counters()
    tokens = {request.request_id: [] for request in requests}
    reasons = {}
    for request in requests:
        engine.add_request(request)
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for update in engine.step():
            assert update.request_id not in reasons, "an update after the last one"
            tokens[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                reasons[update.request_id] = update.finish_reason
    assert reasons.keys() == tokens.keys()
    idle(engine)
    assert engine.counters()["compiles_after_ready"] == before["compiles_after_ready"] == 0
    return {request_id: tuple(ids) for request_id, ids in tokens.items()}


def idle(engine):
    counters = engine.counters()
    assert counters["running"] == counters["waiting"] == 0
    assert counters["free_pages"] == counters["total_pages"]
    assert counters["free_window_pages"] == engine.scheduler.window_pages.capacity


def requests_for(token_lists, sampling):
    return [Request(str(i), tokens, sampling) for i, tokens in enumerate(token_lists)]
