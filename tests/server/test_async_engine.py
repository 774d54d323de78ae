"""The thread that drives the engine: delivery, aborts, limits, failures and hangs."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest
from server_harness import run, running, until

from dspark_jax.engine.async_engine import AsyncEngine, EngineOverloadedError, EngineUnavailableError
from dspark_jax.engine.request import FinishReason, Request, RequestError, RequestUpdate
from dspark_jax.sampling_params import SamplingParams

ENDLESS = lambda _: itertools.repeat((65, 66))  # noqa: E731
NO_LIMIT = SamplingParams(max_tokens=None)


async def collect(engine: AsyncEngine, request_id: str = "r", sampling: SamplingParams = NO_LIMIT, prompt=(5,)):
    return [update async for update in engine.generate(prompt, sampling, request_id=request_id)]


def test_updates_arrive_in_order_as_committed(scripted):
    async def work():
        async with running(scripted(script=[[(5, 6), (), (7,), (8, 1)]])) as engine:
            return await collect(engine)

    updates = run(work())
    assert [update.new_token_ids for update in updates] == [(5, 6), (7,), (8, 1)]
    assert [update.finish_reason for update in updates] == [None, None, FinishReason.STOP]
    assert updates[-1].stop_token_id == 1


def test_many_requests_at_once_get_their_own_tokens(scripted):
    core = scripted(script=lambda r: [(r.prompt_token_ids[0], i) for i in range(20, 40)], max_num_seqs=3)

    async def work():
        async with running(core, max_running=3) as engine:
            return await asyncio.gather(*(collect(engine, f"r{i}", prompt=(i,)) for i in range(2, 18)))

    for first, updates in enumerate(run(work()), start=2):
        tokens = [token for update in updates for token in update.new_token_ids]
        assert tokens == [token for i in range(20, 40) for token in (first, i)] + [1]


def test_core_is_touched_by_one_thread_only(scripted):
    core = scripted("ab")
    threads = set()
    for name in ("add_request", "abort", "has_work", "step", "counters"):
        method = getattr(core, name)
        setattr(core, name, lambda *a, method=method: (threads.add(threading.current_thread().name), method(*a))[1])

    async def work():
        async with running(core) as engine:
            await collect(engine)
            engine.abort("unknown")
            await engine.counters()

    run(work())
    assert threads == {"dspark-engine"}


def test_thread_sleeps_when_idle(scripted):
    core = scripted("ab")
    calls = itertools.count()
    has_work = core.has_work
    core.has_work = lambda: (next(calls), has_work())[1]

    async def work():
        async with running(core) as engine:
            await collect(engine)
            await asyncio.sleep(0.05)
            before = next(calls)
            await asyncio.sleep(0.2)
            assert next(calls) == before + 1
            engine.check_health()  # asleep is not hung

    run(work())


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
def test_leaving_a_request_frees_its_slot(scripted, how):
    core = scripted(script=ENDLESS, max_num_seqs=1, step_seconds=0.001, max_model_len=10**9)

    async def work():
        async with running(core) as engine:
            updates = engine.generate((5,), NO_LIMIT, request_id="r")
            await anext(updates)
            if how == "close":
                await updates.aclose()
            elif how == "abort":
                engine.abort("r")
                rest = [update async for update in updates]
                assert rest[-1].finish_reason is FinishReason.ABORT
            else:
                task = asyncio.create_task(collect(engine, "waiting"))
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await updates.aclose()
            steps = core.counters()["steps"]
            counters = await engine.counters()
            assert (counters["running"], counters["waiting"], counters["in_flight"]) == (0, 0, 0)
            assert counters["steps"] <= steps + 2

    run(work())


def test_group_is_accepted_or_refused_as_a_whole(scripted):
    core = scripted("abc")

    async def work():
        async with running(core) as engine:
            good, bad = Request("a", (5,)), Request("b", (9999,))
            with pytest.raises(RequestError, match="9999"):
                await engine.submit([good, bad])
            counters = await engine.counters()
            assert counters["waiting"] == counters["running"] == counters["in_flight"] == 0
            async with await engine.submit([good, Request("b", (6,))]) as stream:
                finished = [u.request_id async for u in stream if u.finish_reason is not None]
            assert sorted(finished) == ["a", "b"]

    run(work())


def test_refusal_reaches_its_caller_only(scripted):
    core = scripted("abc", step_seconds=0.01)

    async def work():
        async with running(core) as engine:
            other = asyncio.create_task(collect(engine, "other"))
            with pytest.raises(RequestError, match="empty"):
                await collect(engine, "bad", prompt=())
            assert (await other)[-1].finish_reason is FinishReason.STOP
            engine.check_health()

    run(work())


def test_unexpected_error_of_add_request_reaches_its_caller_only(scripted):
    def script(request):
        if request.request_id == "bad":
            raise ZeroDivisionError("a bug")
        return [(65,)]

    async def work():
        async with running(scripted(script=script)) as engine:
            with pytest.raises(ZeroDivisionError):
                await collect(engine, "bad")
            assert (await collect(engine, "good"))[-1].finish_reason is FinishReason.STOP

    run(work())


def test_request_id_in_use_is_refused(scripted):
    core = scripted(script=ENDLESS, step_seconds=0.001)

    async def work():
        async with running(core) as engine:
            async with await engine.submit([Request("a", (5,), NO_LIMIT)]):
                with pytest.raises(RequestError, match="'a' is in use"):
                    await engine.submit([Request("a", (5,))])
            with pytest.raises(RequestError, match="'b' is in use"):
                await engine.submit([Request("b", (5,)), Request("b", (5,))])

    run(work())


def test_waiting_queue_is_bounded(scripted):
    core = scripted(script=ENDLESS, max_num_seqs=1, step_seconds=0.001)

    async def work():
        async with running(core, max_running=1, max_waiting=2) as engine:
            stream = await engine.submit([Request(f"r{i}", (5,), NO_LIMIT) for i in range(3)])
            with pytest.raises(EngineOverloadedError, match="limit 3"):
                await engine.submit([Request("one too many", (5,))])
            engine.check_health()  # full is healthy
            stream.abort("r2")
            await engine.counters()  # the abort has been carried out
            await (await engine.submit([Request("r3", (5,))])).aclose()
            await stream.aclose()

    run(work())


def test_failing_step_ends_every_request_with_an_error(scripted):
    def fail(step):
        if step == 3:
            raise FloatingPointError("nan in the logits\nsecret second line")

    core = scripted(script=ENDLESS, max_num_seqs=1, on_step=fail)

    async def work():
        engine = AsyncEngine(core)
        engine.start()
        results = await asyncio.gather(*(collect(engine, f"r{i}") for i in range(3)))
        for updates in results:
            assert updates[-1].finish_reason is FinishReason.ERROR
            assert updates[-1].error == "the engine has failed: FloatingPointError: nan in the logits"
        with pytest.raises(EngineUnavailableError, match="nan in the logits"):
            engine.check_health()
        for question in (engine.counters(), collect(engine, "late")):
            with pytest.raises(EngineUnavailableError, match="nan in the logits"):
                await question
        await engine.stop()

    run(work())


def test_hanging_step_turns_health_red_and_nobody_waits_for_ever(scripted):
    release = threading.Event()
    core = scripted("a long answer", on_step=lambda step: step == 2 and release.wait(20))

    async def work():
        async with running(core, step_timeout_s=0.2) as engine:
            start = time.monotonic()
            updates = await collect(engine)
            assert updates[-1].finish_reason is FinishReason.ERROR
            assert "hangs" in updates[-1].error
            assert time.monotonic() - start < 2
            with pytest.raises(EngineUnavailableError, match=r"limit 0\.2 s"):
                engine.check_health()
            with pytest.raises(EngineUnavailableError):
                await engine.submit([Request("late", (5,))])
            release.set()
            await until(lambda: engine._hang() is None)  # a step that comes back after all
            assert (await collect(engine, "next"))[-1].finish_reason is FinishReason.STOP
            assert (await engine.counters())["in_flight"] == 0

    run(work())


def test_submitting_while_a_step_hangs_does_not_wait_for_ever(scripted):
    release = threading.Event()
    core = scripted("abc", on_step=lambda step: step == 0 and release.wait(20))

    async def work():
        async with running(core, step_timeout_s=0.2) as engine:
            first = asyncio.create_task(collect(engine, "first"))
            await until(lambda: core.counters()["steps"] == 1)
            with pytest.raises(EngineUnavailableError, match="hangs"):
                await engine.submit([Request("second", (5,))])
            assert (await first)[-1].finish_reason is FinishReason.ERROR
            release.set()
            await until(lambda: not core.has_work())

    run(work())


def test_stop_of_a_hanging_engine_returns(scripted):
    release = threading.Event()
    core = scripted("abc", on_step=lambda _: release.wait(20))

    async def work():
        engine = AsyncEngine(core, step_timeout_s=0.1)
        engine.start()
        task = asyncio.create_task(collect(engine))
        await asyncio.sleep(0.3)
        await engine.stop()
        assert (await task)[-1].finish_reason is FinishReason.ERROR
        release.set()
        engine._thread.join(5)

    run(work())


@pytest.mark.parametrize(("drain_s", "reason"), [(0.0, FinishReason.ABORT), (5.0, FinishReason.STOP)])
def test_stop_drains_or_aborts(scripted, drain_s, reason):
    core = scripted("0123456789", step_seconds=0.02)

    async def work():
        engine = AsyncEngine(core)
        with pytest.raises(EngineUnavailableError, match="not been started"):
            engine.check_health()
        engine.start()
        task = asyncio.create_task(collect(engine))
        await until(lambda: core.counters()["running"])
        stopping = asyncio.create_task(engine.stop(drain_s=drain_s))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await collect(engine, "late")
        await stopping
        assert (await task)[-1].finish_reason is reason
        assert not core.has_work()
        await engine.stop()  # once more does no harm

    run(work())


def test_error_of_one_request_is_its_own(scripted):
    core = scripted("abc")
    step = core.step

    def poisoned():
        updates = step()
        for update in updates:
            if update.request_id == "bad":
                core.abort("bad")
        return [
            RequestUpdate("bad", finish_reason=FinishReason.ERROR, error="nan") if u.request_id == "bad" else u
            for u in updates
        ]

    core.step = poisoned

    async def work():
        async with running(core) as engine:
            bad, good = await asyncio.gather(collect(engine, "bad"), collect(engine, "good"))
            assert bad == [RequestUpdate("bad", finish_reason=FinishReason.ERROR, error="nan")]
            assert good[-1].finish_reason is FinishReason.STOP

    run(work())


@pytest.mark.parametrize("options", [{"max_running": 0}, {"max_waiting": -1}, {"step_timeout_s": 0.0}])
def test_bad_limits_are_refused(scripted, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AsyncEngine(scripted("a"), **options)
