"""Compiled steps under load: nothing a step leaves behind, pads or is late with may reach another request.

Serving contracts, sections 2.4, 4.3 to 4.8 and the integrity gate of section 8. Most tests share one engine with 64
slots and the verification shapes 4, 8 and 64 requests of 1 + 5 rows.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import greedy, prompts, requests_for, run
from small_models import small_config

from dspark_jax import telemetry
from dspark_jax.cache.allocator import WINDOW_PAGE_TOKENS, SlotPool
from dspark_jax.config import ConfigError, EngineConfig, ModelConfig, SpeculativeConfig, resolve_depth
from dspark_jax.engine.buckets import DecodeShape, StepShapes, is_uniform_verify
from dspark_jax.engine.engine import LLMEngine
from dspark_jax.engine.request import Request
from dspark_jax.engine.scheduler import Phase, ScheduledStep
from dspark_jax.engine.steps import DecodeBatch, _uniform_rows
from dspark_jax.sampling import RowSampling
from dspark_jax.sampling_params import SamplingParams
from dspark_jax.spec_decode.depth import DepthSchedule, limit_drafts
from dspark_jax.spec_decode.staging import DraftCapacities
from pallas_kernels import compressor

K = 5
GATE = {"max_num_seqs": 64, "max_num_batched_tokens": 384, "decode_buckets": (4, 8), "prefill_buckets": (64,)}
SMALL, LARGE = DecodeShape(4, K), DecodeShape(64, K)


@pytest.fixture
def gate(engines):
    engine = engines(K, **GATE)
    engine.reset_prefix_cache()
    yield engine
    for request_id in list(engine._live):
        engine.abort(request_id)
    while engine.has_work():
        engine.step()


def alone(engines, requests):
    """What each request gets by itself, without speculation, one at a time."""
    engine = engines(0, max_num_seqs=1, num_blocks=3)
    engine.reset_prefix_cache()
    tokens = {}
    for request in requests:
        tokens |= run(engine, [request])
    return tokens


@contextlib.contextmanager
def buckets_used(engine):
    """Collects ``(bucket, live decodes)`` of every step."""
    used, dispatch = [], engine.runner.dispatch

    def watch(step):
        used.append((engine.runner.bucket(step), len(step.decodes)))
        return dispatch(step)

    engine.runner.dispatch = watch
    try:
        yield used
    finally:
        del engine.runner.dispatch


def decoding(engine, token_lists, *, steps=4, sampling=None):
    """Brings requests to a pause between two steps, all decoding and with their results known. Returns the step that
    would come next."""
    for request in requests_for(token_lists, sampling or greedy(200)):
        engine.add_request(request)
    while any(s.phase is not Phase.DECODE for s in engine._live.values()):
        engine.step()
    for _ in range(steps):
        engine.step()
    while engine._pending:
        engine._process(engine._pending.popleft())
    step = engine.scheduler.schedule()
    assert len(step.decodes) == len(token_lists)
    return step


def launch(runner, state, sequences, bucket, **changes):
    """One step of a compiled program on a copy of ``state``: the state after it and its output, on the host."""
    batch = dataclasses.replace(runner._decode_batch(sequences, bucket.num_seqs), **changes)
    after, output = runner._programs[bucket](runner._params, jax.device_put(state), batch)
    return jax.tree.map(np.array, (after, output))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# -- the integrity gate ---------------------------------------------------------------------------------------------
def check_gate(engines, k, **sizes):
    """As many concurrent requests as there are slots: each equals its own run alone without speculation."""
    engine = engines(k, **sizes)
    count = engine.config.max_num_seqs
    requests = requests_for(prompts(np.random.default_rng(8), count, 60), greedy(24))
    with buckets_used(engine) as used:
        got = run(engine, requests)
    assert (DecodeShape(count, k), count) in used, "never all at once"
    assert engine.shapes.capacity == count * (1 + k)
    assert got == alone(engines, requests)


@pytest.mark.contract("C64-K5")
def test_64_concurrent_requests_of_6_rows(engines, gate):
    check_gate(engines, K, **GATE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.contract("C64-K7")
def test_64_concurrent_requests_of_8_rows(engines):
    sizes = {**GATE, "max_num_batched_tokens": 512, "decode_buckets": (8,), "prefill_buckets": (128,)}
    check_gate(engines, 7, **sizes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.contract("C128-K5")
def test_128_concurrent_requests_of_6_rows(engines):
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 768, "decode_buckets": (8,), "prefill_buckets": (128,)}
    check_gate(engines, K, **sizes)


@pytest.mark.contract("C64-K5", "VR-5")
def test_a_capacity_too_small_refuses_to_start(models):
    config = EngineConfig(**GATE, max_model_len=512, speculative=SpeculativeConfig(K), decode_row_capacity=256)
    with pytest.raises(ConfigError, match=r"decode_row_capacity 256 is smaller than the 384 rows that 64 requests"):
        LLMEngine(models("dspark"), config, progress=False)


@pytest.mark.contract("VR-5")
def test_a_step_beyond_the_capacity_is_refused_before_dispatch(gate, monkeypatch):
    step = decoding(gate, prompts(np.random.default_rng(1), 4, 20))
    before = gate.runner.snapshot()
    monkeypatch.setattr(gate.runner, "shapes", dataclasses.replace(gate.shapes, capacity=23, decode=()))
    monkeypatch.setattr(StepShapes, "decode_shape", lambda self, n: SMALL)
    with pytest.raises(ValueError, match="decode rows 24 exceed the declared capacity 23"):
        gate.runner.dispatch(step)
    monkeypatch.undo()
    assert_equal(gate.runner.snapshot(), before)


# -- frozen shapes --------------------------------------------------------------------------------------------------
@pytest.mark.contract("VR-8")
def test_nothing_compiles_at_any_number_of_live_requests(gate):
    """200 steps with 1 to 64 live requests, in every phase, with arrivals and aborts between any two."""
    rng, number = np.random.default_rng(0), 0
    before, used = telemetry.compile_count(), set()
    with buckets_used(gate) as steps:
        for _ in range(200):
            target = int(2 ** rng.uniform(0, 6.02))
            live = list(gate._live)
            for request_id in rng.permutation(live)[: max(0, len(live) - target)]:
                gate.abort(str(request_id))
            for _ in range(target - len(live)):
                number += 1
                (prompt,) = prompts(rng, 1, 30)
                gate.add_request(Request(str(number), prompt, greedy(30)))
            gate.step()
        used = {bucket for bucket, _ in steps}
    assert used == set(gate.runner._programs), "a program was never run"
    assert telemetry.compile_count() == before
    assert gate.counters()["compiles_after_ready"] == 0
    assert gate.counters()["compiled_programs"] == len(used)


@pytest.mark.contract("VR-9")
@pytest.mark.parametrize("k", [5, 7])
def test_every_verifier_row_reaches_the_compressors(k):
    """Two requests: rows belong to request 0, then to 1, and each leaves its projection in its request's ring."""
    position = jnp.array([10, 300], jnp.int32)
    batch = DecodeBatch(
        slot=jnp.array([3, 1], jnp.int32),
        num_drafts=jnp.full(2, k, jnp.int32),
        first_valid=jnp.zeros(2, jnp.int32),
        window_table=jnp.ones((2, 4), jnp.int32),
        block_table=jnp.ones((2, 4), jnp.int32),
        sampling=RowSampling.from_params([SamplingParams()] * 2, [0, 0], size=2),
    )
    rows = _uniform_rows(jnp.zeros((2, 1 + k), jnp.int32), position, jnp.full(2, 1 + k, jnp.int32), batch)
    assert rows.request.tolist() == [0] * (1 + k) + [1] * (1 + k)
    assert rows.position.tolist() == [*range(10, 11 + k), *range(300, 301 + k)]
    count, capacity = 2 * (1 + k), 8 + k
    values = jnp.arange(1.0, 1 + count)[:, None] * jnp.ones((count, 6))
    ring, *_ = compressor.pool(
        jnp.zeros((4, capacity, 2, 6)),
        values,
        -values,
        slot=rows.slot,
        start=rows.start,
        first_row=rows.first_row,
        num_rows=rows.num_rows,
        row_request=rows.request,
        ratio=4,
    )
    want = np.zeros((4, capacity, 2, 6), np.float32)
    for n in range(count):
        slot, at = (3, 10 + n) if n <= k else (1, 300 + n - 1 - k)
        want[slot, at % capacity] = [[n + 1] * 6, [-n - 1] * 6]
    np.testing.assert_array_equal(ring, want)


# -- padding --------------------------------------------------------------------------------------------------------
@pytest.mark.contract("PR-1")
def test_a_request_that_left_is_not_touched_by_its_old_row(gate):
    """Three live requests in the shape that four used: slot, drafts, rings and pages of the fourth stay as they are."""
    step = decoding(gate, prompts(np.random.default_rng(2), 4, 20))
    state = gate.runner.snapshot()
    state, _ = launch(gate.runner, state, step.decodes, SMALL)
    gone, rest = step.decodes[3], step.decodes[:3]
    after, output = launch(gate.runner, state, rest, SMALL)
    assert output.num_tokens.tolist()[3] == 0
    assert (output.tokens[3] == -1).all()
    for name in ("anchor", "position", "num_drafts", "drafts", "draft_logits", "confidence"):
        np.testing.assert_array_equal(getattr(after, name)[gone.slot], getattr(state, name)[gone.slot])
    changed = 0
    for old, new in zip(state.trunk.layers + state.draft.layers, after.trunk.layers + after.draft.layers, strict=True):
        for name, before in old.items():
            now = new[name]
            if name.endswith("state"):
                np.testing.assert_array_equal(now[gone.slot], before[gone.slot])
                changed += (now[rest[0].slot] != before[rest[0].slot]).any()
            elif name == "window":
                for page in gone.window.values():
                    rows = slice(page * WINDOW_PAGE_TOKENS, (page + 1) * WINDOW_PAGE_TOKENS)
                    np.testing.assert_array_equal(now[rows], before[rows])
            else:
                rows = slice(gone.blocks[0] * 64, gone.blocks[0] * 64 + 64)
                if name == "index_entries":
                    np.testing.assert_array_equal(now[rows], before[rows])
    assert changed, "the live ones should have moved"


@pytest.mark.contract("PR-2")
def test_padding_never_reaches_the_last_slot(gate):
    """Slot -1 is padding; as an index it would be the last slot, which here belongs to a request that takes no part."""
    step = decoding(gate, prompts(np.random.default_rng(3), 4, 20))
    last = gate.config.max_num_seqs - 1
    state = gate.runner.snapshot()
    marks = {name: getattr(state, name) for name in ("anchor", "position", "num_drafts", "drafts", "confidence")}
    for value in marks.values():
        value[last] = 77
    state = dataclasses.replace(state, **marks)
    after, _ = launch(gate.runner, state, step.decodes[:2], LARGE)
    for name in marks:
        assert (getattr(after, name)[last] == 77).all()
    for old, new in zip(state.trunk.layers, after.trunk.layers, strict=True):
        for name in ("state", "index_state"):
            if name in old:
                np.testing.assert_array_equal(new[name][last], old[name][last])


@pytest.mark.contract("PR-3")
def test_results_do_not_depend_on_the_bucket(gate):
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=100, ignore_eos=True)
    step = decoding(gate, prompts(np.random.default_rng(4), 3, 70), sampling=sampling)
    state = gate.runner.snapshot()
    results = [launch(gate.runner, state, step.decodes, DecodeShape(n, K)) for n in (4, 8, 64)]
    for after, output in results[1:]:
        assert_equal(after, results[0][0])
        for name in ("tokens", "num_tokens", "num_verified", "num_accepted"):
            np.testing.assert_array_equal(getattr(output, name)[:3], getattr(results[0][1], name)[:3])


@pytest.mark.contract("PR-4")
def test_a_step_of_padding_changes_nothing(gate):
    step = decoding(gate, prompts(np.random.default_rng(5), 4, 70))
    state = gate.runner.snapshot()
    for bucket in (SMALL, LARGE):
        after, output = launch(gate.runner, state, (), bucket)
        assert_equal(after, state)
        assert not output.num_tokens.any()
    batch = gate.runner._prefill_batch(ScheduledStep(), 64)
    after, _ = gate.runner._programs[64](gate.runner._params, jax.device_put(state), batch)
    assert_equal(jax.tree.map(np.array, after), state)
    assert_equal(launch(gate.runner, after, step.decodes, SMALL), launch(gate.runner, state, step.decodes, SMALL))


# -- stale writes ---------------------------------------------------------------------------------------------------
@pytest.mark.contract("SW-1")
def test_rejected_tokens_leave_the_drafter_alone(engines, gate):
    """Two of six rows are accepted: the drafter's rows of the other four keep their bytes, those of the two change."""
    token_lists = prompts(np.random.default_rng(6), 4, 20)
    step = decoding(gate, token_lists)
    truth = alone(engines, requests_for(token_lists, greedy(40)))
    state = gate.runner.snapshot()
    drafts = state.drafts.copy()
    for s in step.decodes:
        right = truth[s.request.request_id][s.num_output : s.num_output + 2]
        drafts[s.slot] = [right[0], (right[1] + 1) % 320, 9, 9, 9]
    state = dataclasses.replace(state, drafts=drafts, num_drafts=np.full_like(state.num_drafts, K))
    for layer in state.draft.layers:
        layer["window"][:] = 3  # no row of any token
    after, output = launch(gate.runner, state, step.decodes, SMALL)
    assert output.num_tokens.tolist() == [2] * 4
    written = np.zeros(len(state.draft.layers[0]["window"]), bool)
    for s in step.decodes:
        for p in (s.position, s.position + 1):
            written[s.window[p // WINDOW_PAGE_TOKENS] * WINDOW_PAGE_TOKENS + p % WINDOW_PAGE_TOKENS] = True
    for layer in after.draft.layers:
        assert ((layer["window"] == 3).all(axis=1) == ~written).all()


@pytest.mark.contract("SW-2")
def test_the_null_page_is_never_written(gate):
    rng = np.random.default_rng(7)
    for number in range(100):
        if len(gate._live) < 4:
            (prompt,) = prompts(rng, 1, 200)
            gate.add_request(Request(str(number), prompt, greedy(60)))
        gate.step()
    for request_id in list(gate._live)[1:]:
        gate.abort(request_id)
    state = gate.runner.snapshot()
    for layer in state.trunk.layers + state.draft.layers:
        for name, page in (("window", 64), ("index_entries", 64), ("entries", 2)):
            if name in layer:
                assert not layer[name][:page].any(), "somebody wrote the null page"
    # A row whose table has no page writes nothing at all.
    (sequence,) = gate.scheduler.running
    tables = {"window_table": np.zeros((4, gate.shapes.window_pages), np.int32)}
    tables["block_table"] = np.zeros((4, gate.shapes.block_pages), np.int32)
    after, output = launch(gate.runner, state, [sequence], SMALL, **tables)
    assert output.num_tokens[0] >= 1
    for old, new in zip(state.trunk.layers + state.draft.layers, after.trunk.layers + after.draft.layers, strict=True):
        for name in old.keys() - {"state", "index_state"}:
            np.testing.assert_array_equal(new[name], old[name])


@pytest.mark.contract("SW-3")
def test_a_late_capacity_does_not_reach_the_next_tenant():
    slots = SlotPool(2)
    capacities = DraftCapacities(slots, K)
    a, b = slots.acquire(), slots.acquire()
    capacities.stage([a, b], [1, 2])
    slots.release(a[0])
    c = slots.acquire()
    assert c[0] == a[0]
    capacities.flush()
    assert (capacities.get(*c), capacities.get(*b)) == (K, 2)
    # Not even to the same request, come back to the same slot.
    capacities.stage([c], [0])
    slots.release(c[0])
    again = slots.acquire()
    capacities.flush()
    assert capacities.get(*again) == K


@pytest.mark.contract("SW-4")
def test_slots_are_reused_after_retirement():
    for first_has_left, want in ((False, [2, 3, 1, 3]), (True, [2, 3, 3, 3])):
        slots = SlotPool(4)
        capacities = DraftCapacities(slots, 3)
        tenancies = [slots.acquire() for _ in range(4)]
        capacities.stage([tenancies[2], tenancies[0]], [1, 2])
        if first_has_left:
            slots.release(2)
            tenancies[2] = slots.acquire()
        capacities.flush()
        assert [capacities.get(*tenancy) for tenancy in tenancies] == want
        capacities.flush()
        assert [capacities.get(*tenancy) for tenancy in tenancies] == want
    with pytest.raises(ValueError, match=r"draft capacity must be in \[0, 3\], got 4"):
        capacities.stage([tenancies[0]], [4])


def test_a_capacity_limits_what_is_verified(gate):
    """The same tokens come out, from fewer verified drafts."""
    step = decoding(gate, prompts(np.random.default_rng(9), 4, 20))
    state = gate.runner.snapshot()
    tenancies = [(s.slot, s.generation) for s in step.decodes]
    gate.capacities.stage(tenancies, [0, 1, 3, 5])
    gate.capacities.flush()
    _, limited = launch(gate.runner, state, step.decodes, SMALL)
    _, full = launch(gate.runner, state, step.decodes, SMALL, num_drafts=np.full(4, K, np.int32))
    assert full.num_verified.tolist() == [5] * 4
    assert limited.num_verified.tolist() == [0, 1, 3, 5]
    assert limited.num_tokens[0] == 1
    np.testing.assert_array_equal(limited.tokens[:, 0], full.tokens[:, 0])


# -- depth ----------------------------------------------------------------------------------------------------------
SCHEDULE = {"max_num_seqs": 6, "decode_buckets": (6,), "prefill_buckets": (64,)}


@pytest.mark.contract("SW-5")
def test_drafts_of_a_deeper_step_are_never_verified(gate):
    """The step before drafted 2 tokens, the one before that 5: whatever columns 2 to 4 hold has no effect."""
    step = decoding(gate, prompts(np.random.default_rng(17), 4, 20))
    state = gate.runner.snapshot()
    results = []
    for stale in (9, 200):
        drafts = state.drafts.copy()
        drafts[[s.slot for s in step.decodes], 2:] = stale
        shallow = dataclasses.replace(state, drafts=drafts, num_drafts=np.full_like(state.num_drafts, 2))
        results.append(launch(gate.runner, shallow, step.decodes, SMALL))
    assert_equal(results[0], results[1])
    assert results[0][1].num_verified.tolist() == [2] * 4
    # The next step verifies all five of what was drafted now.
    _, output = launch(gate.runner, results[0][0], step.decodes, SMALL)
    assert output.num_verified.tolist() == [5] * 4


@pytest.mark.slow
@pytest.mark.contract("SW-5", "Z-2")
def test_depth_follows_the_schedule_step_by_step(models, engines):
    """Depth 5, 2 and 0 by the number of running requests: no step verifies more than the one before it drafted, and
    whatever the depth, the tokens are those of plain decoding."""
    speculative = SpeculativeConfig(K, depth_schedule=((2, 5), (4, 2), (6, 0)))
    config = EngineConfig(**SCHEDULE, max_num_batched_tokens=64, max_model_len=512, speculative=speculative)
    engine = LLMEngine(models("dspark"), config, progress=False)
    assert engine.shapes.decode == (DecodeShape(2, 5), DecodeShape(4, 2), DecodeShape(6, 0))
    lengths = (80, 70, 40, 30, 12, 8)
    requests = [
        Request(str(i), prompt, greedy(n))
        for i, (prompt, n) in enumerate(zip(prompts(np.random.default_rng(10), 6, 60), lengths, strict=True))
    ]
    depth, previous, process, checked = {}, {}, engine._process, set()

    def watch(handle):
        output = handle.read()
        for i, s in enumerate(handle.step.decodes):
            limit = previous.get(s.slot, K)  # what its last step drafted; a prefill drafts K
            shape = engine.runner.bucket(handle.step)
            assert output.num_verified[i] <= min(limit, shape.num_drafts)
            if limit < shape.num_drafts:
                checked.add((limit, shape.num_drafts))
            previous[s.slot] = shape.num_drafts
            depth.setdefault(shape.num_drafts, set()).add(int(output.num_verified[i]))
        return process(handle)

    engine._process = watch
    assert run(engine, requests) == alone(engines, requests)
    assert depth[0] == {0}
    assert max(depth[2]) == 2
    assert max(depth[5]) == 5
    assert checked == {(0, 2), (2, 5)}, "depth went up after less was drafted"


@pytest.mark.contract("Z-1")
def test_depth_zero_is_a_depth():
    assert [resolve_depth(depth, 5) for depth in (None, 2, 0)] == [5, 2, 0]


@pytest.mark.contract("Z-2")
def test_shapes_of_a_schedule():
    model = ModelConfig.from_hf(small_config())
    pairs = ((32, 5), (64, 3), (96, 1), (128, 0))
    speculative = SpeculativeConfig(K, depth_schedule=pairs)
    shapes = StepShapes.create(
        model, EngineConfig(max_num_seqs=128, max_num_batched_tokens=768, speculative=speculative, max_model_len=512)
    )
    assert {shape.num_drafts for shape in shapes.decode if shape.num_drafts} == {5, 3, 1}
    assert all(shape.rows > 0 for shape in shapes.decode)
    assert [shapes.decode_shape(n).num_drafts for n in (1, 32, 33, 64, 65, 96, 97, 128)] == [5, 5, 3, 3, 1, 1, 0, 0]
    schedule = DepthSchedule.create(pairs, K)
    assert [schedule.depth(n) for n in (32, 33, 97, 1000)] == [5, 3, 0, 0]
    with pytest.raises(ConfigError, match="at most num_speculative_tokens 5, got 6"):
        DepthSchedule.create(((4, 6),), K)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.contract("Z-2")
def test_100_requests_where_the_schedule_drafts_nothing(models, engines):
    speculative = SpeculativeConfig(K, depth_schedule=((32, 5), (64, 3), (96, 1), (128, 0)))
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 256, "decode_buckets": (128,), "prefill_buckets": (256,)}
    engine = LLMEngine(
        models("dspark"), EngineConfig(**sizes, max_model_len=512, speculative=speculative), progress=False
    )
    requests = requests_for(prompts(np.random.default_rng(11), 100, 40), greedy(20))
    with buckets_used(engine) as used:
        assert run(engine, requests) == alone(engines, requests)
    assert (DecodeShape(128, 0), 100) in used


@pytest.mark.contract("Z-3")
def test_drafts_limited_to_nothing():
    drafts = np.arange(6).reshape(2, 3)
    assert limit_drafts(drafts, 0).shape == (2, 0)
    assert limit_drafts(jnp.asarray(drafts), 2).tolist() == [[0, 1], [3, 4]]


@pytest.mark.contract("SC-1")
def test_chunks_that_look_like_verifications_are_not(gate):
    rows = [8] * 8
    assert not is_uniform_verify(rows, [True] * 2 + [False] * 6, 8)
    assert is_uniform_verify(rows, [False] * 8, 8)
    assert not is_uniform_verify([8] * 7 + [7], [False] * 8, 8)
    # The engine: two prompts of exactly 1 + K tokens arrive while others decode.
    step = decoding(gate, prompts(np.random.default_rng(12), 4, 20))
    assert gate.runner.bucket(step) == SMALL
    prompt = tuple(range(10, 11 + K))
    for name in ("a", "b"):
        gate.add_request(Request(name, prompt, greedy(4)))
    chunks = gate.scheduler.schedule()
    assert [chunk.length for chunk in chunks.chunks] == [1 + K] * 2
    assert gate.runner.bucket(chunks) == 64
    with pytest.raises(ValueError, match="either chunks of prompts or verifications"):
        gate.runner.bucket(dataclasses.replace(chunks, decodes=step.decodes))


# -- lifetime and determinism ---------------------------------------------------------------------------------------
def play(engine, num_steps, between=lambda number: None):
    """Steps of a fixed workload. Returns every update and, now and then, what is held by request on the device."""
    engine.reset_prefix_cache()
    rng, number, updates, states = np.random.default_rng(13), 0, [], []
    for i in range(num_steps):
        while len(engine._live) < 3:
            (prompt,) = prompts(rng, 1, 100)
            sampling = SamplingParams(temperature=number % 2, seed=number, max_tokens=150, ignore_eos=True)
            engine.add_request(Request(str(number), prompt, sampling))
            number += 1
        updates += engine.step()
        if i % 50 == 49:
            state = engine.runner._held_state()
            arrays = state.anchor, state.position, state.drafts, state.draft_logits, state.confidence
            held = [np.array(x) for x in arrays]  # a view would keep the buffer alive
            del state, arrays
            decoding = [s for s in engine.scheduler.running if s.phase is Phase.DECODE]
            states.append({s.request.request_id: [x[s.slot].tobytes() for x in held] for s in decoding})
        between(i)
    for request_id in list(engine._live):
        engine.abort(request_id)
    while engine.has_work():
        engine.step()
    return updates, states


@pytest.mark.contract("GL-1", "GL-4")
def test_other_allocations_do_not_disturb_steps(gate):
    """1,000 steps, then the same among random allocations and frees: bit for bit the same. And a step leaves nothing
    behind: as many bytes live at its end as after the tenth."""
    rng, alive, live_bytes = np.random.default_rng(14), [], {}

    def count(number):
        if number in (9, 989):  # not where play() fetches results
            live_bytes[number] = sum(x.nbytes for x in jax.live_arrays())

    def disturb(number):
        if len(alive) > 5 or (alive and rng.random() < 0.4):
            alive.pop(int(rng.integers(len(alive)))).delete()
        alive.append(jax.device_put(rng.standard_normal(int(rng.integers(1, 200_000)))))

    quiet = play(gate, 1000, count)
    assert live_bytes[9] == live_bytes[989]
    assert sum(len(u.new_token_ids) for u in quiet[0]) > 2000
    assert play(gate, 1000, disturb) == quiet


@pytest.mark.contract("DT-1")
def test_two_identical_runs_are_bitwise_equal(gate):
    first, second = play(gate, 250), play(gate, 250)
    assert first == second
    assert len(first[1]) == 5
    assert all(first[1])


@pytest.mark.contract("GL-2")
def test_donated_state_cannot_be_touched(gate):
    step = decoding(gate, prompts(np.random.default_rng(15), 4, 20))
    old = gate.runner._held_state()
    gate.runner.dispatch(step)
    for array in jax.tree.leaves(old):
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(array)
    # Nothing public hands out arrays of the device: snapshots are copies on the host.
    for owner in (gate, gate.runner):
        for name in dir(owner):
            if not name.startswith("_"):
                value = getattr(owner, name)
                assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)), name
    snapshot = gate.runner.snapshot()
    assert all(isinstance(leaf, np.ndarray) and leaf.flags.owndata for leaf in jax.tree.leaves(snapshot))


@pytest.mark.contract("GL-3")
def test_host_arrays_may_change_right_after_dispatch(gate, monkeypatch):
    requests = requests_for(prompts(np.random.default_rng(16), 4, 90), greedy(30))
    want = run(gate, requests)
    gate.reset_prefix_cache()
    runner, batches = gate.runner, []
    for name in ("_decode_batch", "_prefill_batch"):
        build = getattr(runner, name)

        def keep(*args, build=build):
            batches.append(build(*args))
            return batches[-1]

        monkeypatch.setattr(runner, name, keep)
    dispatch = runner.dispatch

    def dispatch_and_scribble(step):
        handle = dispatch(step)
        for leaf in jax.tree.leaves(batches.pop()):
            leaf[...] = True if leaf.dtype == bool else 1
        return handle

    monkeypatch.setattr(runner, "dispatch", dispatch_and_scribble)
    assert run(gate, requests) == want
