"""A server over the scripted engine: every test says which tokens the model produces, and in which groups."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from dspark_jax.engine.async_engine import AsyncEngine
from dspark_jax.engine.request import EngineCore
from dspark_jax.server.app import create_app
from dspark_jax.server.run import bind, make_server
from dspark_jax.text.tokenizer import Tokenizer

MODEL = "tiny"
VOCAB_SIZE = 512


def grouped(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    """``tokens`` in groups of ``size``, as if every step committed that many."""
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def run(work: Coroutine[Any, Any, Any], seconds: float = 20.0) -> Any:
    """Runs a coroutine to its end; a test that hangs fails instead."""
    return asyncio.run(asyncio.wait_for(work, seconds))


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Waits for ``condition``. Fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(core: EngineCore, **options: Any) -> AsyncGenerator[AsyncEngine]:
    engine = AsyncEngine(core, **options)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def http_client(app: FastAPI) -> AsyncGenerator[httpx.AsyncClient]:
    """A client that calls the application directly. The engine must have been started."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@contextlib.asynccontextmanager
async def serving(
    core: EngineCore, tokenizer: Tokenizer, *, app_options: dict[str, Any] | None = None, **engine_options: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """The application over ``core`` and a client for it."""
    async with (
        running(core, **engine_options) as engine,
        http_client(create_app(engine, tokenizer, MODEL, **(app_options or {}))) as client,
    ):
        yield client


@contextlib.contextmanager
def live_server(app: FastAPI) -> Iterator[str]:
    """A real uvicorn on a free loopback port, in a thread. Gives its URL."""
    listener = bind("127.0.0.1", 0)
    server: uvicorn.Server = make_server(app, shutdown_timeout_s=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
    assert not thread.is_alive(), "the server did not shut down"


def concat(parts: Iterable[str | None]) -> str:
    return "".join(part or "" for part in parts)
