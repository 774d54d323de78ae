"""An engine for asyncio programs: one thread drives the steps, any number of coroutines wait for tokens."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Self

from dspark_jax.engine.request import EngineCore, FinishReason, Request, RequestError, RequestUpdate
from dspark_jax.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class EngineUnavailableError(RuntimeError):
    """The engine cannot serve: it has failed, hangs, is not running or is shutting down."""


class EngineOverloadedError(EngineUnavailableError):
    """The waiting queue is full. Trying again later may succeed."""


class RequestStream:
    """Updates of a group of requests as they come; iteration ends when every request of the group has ended.

    Leaving it (``aclose``, or the end of an ``async with``) aborts whatever has not ended. Made by
    ``AsyncEngine.submit`` and used in the event loop it was made in.
    """

    def __init__(self, engine: AsyncEngine, request_ids: Iterable[str]):
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._live = set(request_ids)
        self._updates: collections.deque[RequestUpdate] = collections.deque()
        self._arrived = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestUpdate:
        while self._live:
            while not self._updates:
                self._arrived.clear()
                try:
                    await self._engine._wait(self._arrived)
                except EngineUnavailableError as error:
                    self._fail(str(error))
            update = self._updates.popleft()
            if update.request_id not in self._live:
                continue  # a request that the consumer has already left
            if update.finish_reason is not None:
                self._live.discard(update.request_id)
            return update
        raise StopAsyncIteration

    def abort(self, request_id: str) -> None:
        """Ends one request of the group. No further update of it is seen here."""
        if request_id in self._live:
            self._live.discard(request_id)
            self._engine.abort(request_id)

    async def aclose(self) -> None:
        """Aborts every request that has not ended."""
        for request_id in list(self._live):
            self.abort(request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """For the engine, in this stream's event loop."""
        self._updates.extend(updates)
        self._arrived.set()

    def _fail(self, message: str) -> None:
        for request_id in self._live:
            self._engine.abort(request_id)
            self._updates.append(RequestUpdate(request_id, finish_reason=FinishReason.ERROR, error=message))


class _Answer[T]:
    """What the engine's thread says to one waiting coroutine: a value or an error."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._result: T | None = None
        self._error: Exception | None = None
        self.arrived = asyncio.Event()

    def set(self, result: T | None = None, error: Exception | None = None) -> None:
        self._result, self._error = result, error
        _call_in_loop(self._loop, self.arrived.set)

    def take(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class _Add:
    requests: tuple[Request, ...]
    answer: _Answer[None]


@dataclasses.dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclasses.dataclass(frozen=True)
class _Counters:
    answer: _Answer[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class _Stop:
    pass


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    # A loop that has been closed has nobody left who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


class AsyncEngine:
    """Owns the one thread that touches ``core`` and hands its updates to coroutines, in any number of event loops.

    Commands (add, abort, counters) are taken between two steps; the thread sleeps while there is neither a command nor
    work. If ``core.step`` raises, every request in flight ends with an ``ERROR`` update, nothing more is accepted and
    ``check_health`` raises. The same holds, for as long as it lasts, when one step takes longer than
    ``step_timeout_s``.

    At most ``max_running + max_waiting`` requests are in flight; more raise ``EngineOverloadedError``. ``max_running``
    is the number of the core's request slots.
    """

    def __init__(self, core: EngineCore, *, max_running: int = 8, max_waiting: int = 256, step_timeout_s: float = 60.0):
        if max_running < 1 or max_waiting < 0:
            raise ValueError(f"expected max_running >= 1 and max_waiting >= 0, got {max_running} and {max_waiting}")
        if not step_timeout_s > 0:
            raise ValueError(f"step_timeout_s must be positive, got {step_timeout_s}")
        self.max_model_len = core.max_model_len
        self.vocab_size = core.vocab_size
        self.eos_token_id = core.eos_token_id
        self.max_in_flight = max_running + max_waiting
        self.step_timeout_s = step_timeout_s
        self._core = core
        self._commands: queue.SimpleQueue[_Add | _Abort | _Counters | _Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Guarded by the lock. An id stays until the core has let go of it.
        self._streams: dict[str, RequestStream] = {}
        self._answers: set[_Answer] = set()
        self._unavailable: str | None = "the engine has not been started"
        self._busy_since: float | None = None  # None while the thread sleeps
        self._thread: threading.Thread | None = None

    # -- life -------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Starts the thread. Does nothing if it has been started before; an engine cannot be started again."""
        if self._thread is None:
            self._unavailable = None
            # A daemon: a step that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
            self._thread.start()

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Ends the thread. Nothing more is accepted; requests may finish for up to ``drain_s`` seconds, then the others
        end with an ``ABORT`` update."""
        with self._lock:
            self._unavailable = self._unavailable or "the engine is shutting down"
        if self._thread is None:
            return
        deadline = time.monotonic() + drain_s
        while self._streams and self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join, 0.1 if self._hang() else self.step_timeout_s)
        if self._thread.is_alive():
            message = self._hang() or "the engine hangs"
            logger.error("%s; its thread is left behind", message)
            self._end_all(FinishReason.ERROR, message)

    def check_health(self) -> None:
        """Raises ``EngineUnavailableError`` saying why, if requests cannot be served now."""
        reason = self._unavailable or self._hang()
        if reason is not None:
            raise EngineUnavailableError(reason)

    def _hang(self) -> str | None:
        busy_since = self._busy_since
        if busy_since is None or (seconds := time.monotonic() - busy_since) <= self.step_timeout_s:
            return None
        return f"the engine hangs: a step has been running for {seconds:.1f} s (limit {self.step_timeout_s:g} s)"

    # -- requests ---------------------------------------------------------------------------------------------------
    async def submit(self, requests: Sequence[Request]) -> RequestStream:
        """Queues ``requests`` together, all or none, and returns once the core has accepted them.

        Request ids should never be used twice. Raises ``RequestError`` if the core refuses one or an id is in use,
        ``EngineOverloadedError`` if they do not fit in the waiting queue, ``EngineUnavailableError`` if the engine has
        failed, hangs or is shutting down.
        """
        ids = [request.request_id for request in requests]
        stream = RequestStream(self, ids)
        answer: _Answer[None] = _Answer()
        with self._lock:
            self.check_health()
            if len(self._streams) + len(ids) > self.max_in_flight:
                raise EngineOverloadedError(
                    f"the engine is full: {len(self._streams)} requests in flight, {len(ids)} more do not fit "
                    f"(limit {self.max_in_flight})"
                )
            for request_id in ids:
                if request_id in self._streams or ids.count(request_id) > 1:
                    raise RequestError(f"request id {request_id!r} is in use", "request_id")
            self._streams.update(dict.fromkeys(ids, stream))
            self._answers.add(answer)
            self._commands.put(_Add(tuple(requests), answer))
        try:
            await self._wait(answer.arrived)
        except BaseException:
            await stream.aclose()
            raise
        answer.take()
        return stream

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, choice: int = 0
    ) -> AsyncGenerator[RequestUpdate]:
        """Updates of one request, the last one with a finish reason.

        Closing the iterator or cancelling the task aborts the request. Raises what ``submit`` raises, at the first
        update.
        """
        request = Request(request_id, tuple(prompt_ids), sampling, choice)
        async with await self.submit([request]) as stream:
            async for update in stream:
                yield update

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; who waits for it gets an ``ABORT`` update. Unknown ids are ignored."""
        self._commands.put(_Abort(request_id))

    async def counters(self) -> dict[str, float]:
        """The core's counters between two steps, and ``in_flight``. Raises ``EngineUnavailableError``."""
        answer: _Answer[dict[str, float]] = _Answer()
        with self._lock:
            self.check_health()
            self._answers.add(answer)
            self._commands.put(_Counters(answer))
        await self._wait(answer.arrived)
        return answer.take()

    async def _wait(self, event: asyncio.Event) -> None:
        """Waits for the thread to set ``event``. Raises ``EngineUnavailableError`` if the thread hangs or has ended.

        An engine that is shutting down is not a reason to give up: its requests may still finish.
        """
        while not event.is_set():
            try:
                async with asyncio.timeout(min(1.0, self.step_timeout_s / 4)):
                    await event.wait()
            except TimeoutError:
                alive = self._thread is not None and self._thread.is_alive()
                reason = self._hang() if alive else self._unavailable
                if reason is not None:
                    raise EngineUnavailableError(reason) from None

    # -- the thread -------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_work():
                    self._busy_since = time.monotonic()
                    self._hand_out(self._core.step())
            for request_id in list(self._streams):
                self._core.abort(request_id)
            self._end_all(FinishReason.ABORT, "the engine is shutting down")
        except BaseException as error:
            logger.exception("the engine has failed; every request in flight ends with an error")
            first_line = next(iter(str(error).splitlines()), "")[:300]
            message = f"the engine has failed: {type(error).__name__}: {first_line}"
            with self._lock:
                self._unavailable = message
            self._end_all(FinishReason.ERROR, message)
        finally:
            self._busy_since = None

    def _take_commands(self) -> bool:
        """Carries out the commands that wait, sleeping until there is one if there is no work. False after a stop."""
        sleep = not self._core.has_work()
        while True:
            if sleep:
                self._busy_since = None
            try:
                command = self._commands.get(block=sleep)
            except queue.Empty:
                return True
            self._busy_since = time.monotonic()
            sleep = False
            match command:
                case _Add():
                    self._add(command)
                case _Abort(request_id):
                    if request_id in self._streams:
                        self._core.abort(request_id)
                        self._hand_out([RequestUpdate(request_id, finish_reason=FinishReason.ABORT, error="aborted")])
                case _Counters(answer):
                    self._reply(answer, {**self._core.counters(), "in_flight": len(self._streams)})
                case _Stop():
                    return False

    def _add(self, command: _Add) -> None:
        added: list[str] = []
        try:
            for request in command.requests:
                self._core.add_request(request)
                added.append(request.request_id)
        except Exception as error:
            # One request must not take the engine down, whatever is wrong with it.
            if not isinstance(error, RequestError):
                logger.exception("the engine could not add a request")
            for request_id in added:
                self._core.abort(request_id)
            with self._lock:
                for request in command.requests:
                    self._streams.pop(request.request_id, None)
            self._reply(command.answer, error=error)
        else:
            self._reply(command.answer)

    def _reply(self, answer: _Answer, result: object = None, error: Exception | None = None) -> None:
        with self._lock:
            self._answers.discard(answer)
        answer.set(result, error)

    def _hand_out(self, updates: Sequence[RequestUpdate]) -> None:
        by_stream: dict[RequestStream, list[RequestUpdate]] = {}
        with self._lock:
            for update in updates:
                stream = self._streams.get(update.request_id)
                if stream is not None:
                    by_stream.setdefault(stream, []).append(update)
                    if update.finish_reason is not None:
                        del self._streams[update.request_id]
        for stream, its_updates in by_stream.items():
            _call_in_loop(stream.loop, stream.deliver, its_updates)

    def _end_all(self, reason: FinishReason, message: str) -> None:
        """Ends every request in flight and answers every question, so that nobody waits for ever."""
        with self._lock:
            answers, self._answers = self._answers, set()
            ids = list(self._streams)
        for answer in answers:
            answer.set(error=EngineUnavailableError(message))
        self._hand_out([RequestUpdate(request_id, finish_reason=reason, error=message) for request_id in ids])
