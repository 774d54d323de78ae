"""The prefix cache: a hit changes the work, not the tokens."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from harness import greedy, idle, prompts, run
from small_models import small_config

from dspark_jax.cache.allocator import PagePool
from dspark_jax.cache.prefix import BlockNames, PrefixCache
from dspark_jax.config import EngineConfig, ModelConfig
from dspark_jax.engine.buckets import StepShapes
from dspark_jax.engine.request import Request
from dspark_jax.engine.scheduler import Scheduler
from dspark_jax.sampling_params import SamplingParams

PRESSED = {"max_num_seqs": 4, "num_blocks": 5}
PLAIN = {"max_num_seqs": 1, "num_blocks": 3}
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True)


@pytest.fixture
def engine(engines):
    engine = engines(None, **PRESSED)
    engine.reset_prefix_cache()
    return engine


def collect(engine, request):
    """Tokens of one request, its ``(drafted, accepted)`` per update and how many tokens came from the cache."""
    engine.add_request(request)
    updates = []
    while engine.has_work():
        updates += engine.step()
    idle(engine)
    tokens = sum((u.new_token_ids for u in updates), ())
    return tokens, [(u.num_drafted, u.num_accepted) for u in updates], updates[-1].num_cached_tokens


@pytest.mark.parametrize("sampling", [greedy(40), SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [255, 256, 257, 300, 460])
def test_a_warm_request_is_the_cold_one(engine, length, sampling):
    """Tokens, and every single draft's acceptance: the drafter's context comes back with the blocks."""
    rng = np.random.default_rng(length)
    prompt = tuple(rng.integers(8, 320, length).tolist())
    cold = collect(engine, Request("cold", prompt, sampling))
    assert cold[2] == 0
    warm = collect(engine, Request("warm", prompt, sampling))
    assert warm[:2] == cold[:2]
    # The last token is always computed: its logits are the next token's law.
    assert warm[2] == (256 if length >= 256 else 0)
    engine.reset_prefix_cache()
    again = collect(engine, Request("again", prompt, sampling))
    assert again == cold


def test_another_continuation_of_a_shared_prefix(engine, engines):
    """A system prompt and two users: the second's tokens are those of an engine that never saw the first."""
    rng = np.random.default_rng(0)
    shared, a, b = (tuple(rng.integers(8, 320, n).tolist()) for n in (300, 40, 70))
    fresh = collect(engines(0, **PLAIN), Request("fresh", shared + b, greedy(30)))[0]
    collect(engine, Request("a", shared + a, greedy(30)))
    tokens, _, cached = collect(engine, Request("b", shared + b, greedy(30)))
    assert (tokens, cached) == (fresh, 256)
    tokens, _, cached = collect(engine, Request("c", (*shared[:200], 9, *shared[201:], *b), greedy(30)))
    assert cached == 0
    assert tokens != fresh


def test_the_next_turn_of_a_conversation(engine, engines):
    """Blocks that an answer completes are found by the prompt that quotes it."""
    rng = np.random.default_rng(1)
    prompt = tuple(rng.integers(8, 320, 200).tolist())
    answer = collect(engine, Request("first", prompt, greedy(100)))[0]
    turn = (*prompt, *answer, *rng.integers(8, 320, 20).tolist())
    tokens, _, cached = collect(engine, Request("second", turn, greedy(30)))
    assert cached == 256
    assert tokens == collect(engines(0, **PLAIN), Request("fresh", turn, greedy(30)))[0]


def test_requests_share_while_the_first_still_runs(engine):
    """The second is admitted in the middle of the first; the first leaves, then the second."""
    prompt = tuple(np.random.default_rng(2).integers(8, 320, 280).tolist())
    alone = collect(engine, Request("alone", prompt, greedy(60)))[0]
    engine.reset_prefix_cache()
    engine.add_request(Request("x", prompt, greedy(20)))
    updates = []
    while engine.scheduler.running == [] or engine.scheduler.running[0].num_output < 3:
        updates += engine.step()
    engine.add_request(Request("y", prompt, greedy(60)))
    held = set()
    while engine.has_work():
        updates += engine.step()
        held |= {engine.scheduler.blocks.holders(s.blocks[0]) for s in engine.scheduler.running if s.blocks}
    got = {name: sum((u.new_token_ids for u in updates if u.request_id == name), ()) for name in "xy"}
    assert got == {"x": alone[:20], "y": alone}
    assert 2 in held, "the block was never shared"
    idle(engine)


def test_eviction_under_pressure(engines, caplog):
    """Four usable blocks and prompts of two: what is kept makes way, least recently used first, and is found again
    where it survived."""
    engine = engines(None, **PRESSED)
    engine.reset_prefix_cache()
    rng = np.random.default_rng(3)
    a, b, c = (tuple(rng.integers(8, 320, 300).tolist()) for _ in range(3))
    before = engine.counters()
    cold = {name: collect(engine, Request(name, p, greedy(20))) for name, p in (("a", a), ("b", b), ("c", c))}
    assert [x[2] for x in cold.values()] == [0, 0, 0]
    with caplog.at_level(logging.INFO):
        warm = collect(engine, Request("c", c, greedy(20)))
    assert warm == (*cold["c"][:2], 256)
    assert "request c: 256 of 300 tokens come from the prefix cache" in caplog.text
    for _ in range(2):
        long = tuple(rng.integers(8, 320, 480).tolist())
        collect(engine, Request("long", long, greedy(20)))
    again = collect(engine, Request("c", c, greedy(20)))
    assert again[:2] == cold["c"][:2]
    after = engine.counters()
    grown = {name: after[name] - before[name] for name in after if name.startswith("prefix")}
    assert grown["prefix_hits"] == 1 + (again[2] > 0)
    assert grown["prefix_hit_tokens"] == 256 * grown["prefix_hits"]
    assert grown["prefix_query_tokens"] == 300 * 5 + 480 * 2
    assert grown["prefix_evictions"] > 0
    assert after["prefix_cached_blocks"] <= 4


def test_an_mtp_block_continues_only_the_token_it_saw(engines):
    """The row before a boundary holds the token behind it: another continuation is recomputed, the same one is not."""
    engine = engines(None, draft="mtp", max_num_seqs=2, max_num_batched_tokens=32)
    engine.reset_prefix_cache()
    rng = np.random.default_rng(4)
    shared = tuple(rng.integers(8, 320, 256).tolist())
    cold = collect(engine, Request("a", (*shared, 20, 30), greedy(30)))
    warm = collect(engine, Request("b", (*shared, 20, 30), greedy(30)))
    assert warm == (*cold[:2], 256)
    other = collect(engine, Request("c", (*shared, 21, 30), greedy(30)))
    assert other[2] == 0
    engine.reset_prefix_cache()
    assert collect(engine, Request("d", (*shared, 21, 30), greedy(30))) == other


def test_many_random_prefixes(engines):
    """Forks of a few prompts at random places, several at once under page pressure, against plain runs alone."""
    engine, plain = engines(None, **PRESSED), engines(0, **PLAIN)
    rng = np.random.default_rng(5)
    trunks = [tuple(rng.integers(8, 320, 480).tolist()) for _ in range(2)]
    requests = []
    for i in range(16):
        cut = int(rng.choice([100, 256, 257, 300, 400]))
        requests.append(Request(str(i), trunks[i % 2][:cut] + prompts(rng, 1, 20)[0], greedy(12)))
    plain.reset_prefix_cache()
    want = {}
    for request in requests:
        plain.reset_prefix_cache()
        want |= run(plain, [request])
    hits = engine.counters()["prefix_hits"]
    assert run(engine, requests) == want
    assert engine.counters()["prefix_hits"] > hits


def test_switched_off():
    config = ModelConfig.from_hf(small_config())
    on, off = (
        StepShapes.create(config, EngineConfig(max_num_seqs=2, max_model_len=512, prefix_caching=flag))
        for flag in (True, False)
    )
    assert (off.tail_pages, on.tail_pages) == (0, 1)
    assert off.num_window_pages < on.num_window_pages
    scheduler = Scheduler(off, max_num_seqs=2, sliding_window=32, eos_token_id=1)
    assert scheduler.prefix is None


def test_a_collision_of_names_shares_nothing(monkeypatch):
    """All hashes equal: tokens decide, so a prompt made to collide with another's never gets its pages."""
    monkeypatch.setattr("dspark_jax.cache.prefix.xxhash.xxh3_128_digest", lambda data: b"same")
    blocks, pages = PagePool("blocks", 9), PagePool("pages", 9)
    cache = PrefixCache(blocks, pages, tail_pages=1)
    a, b = [1] * 256 + [2] * 256, [3] * 512
    held, window = blocks.allocate(4), {3: pages.allocate(1)[0]}
    node = cache.register(a, BlockNames(), 0, None, held[0], window)
    assert node is not None
    assert cache.register(b, BlockNames(), 0, None, held[1], window) is None
    assert cache.lookup([*b, 4], BlockNames(), 512).num_tokens == 0
    assert cache.lookup(a, BlockNames(), 512).blocks == (held[0],)
