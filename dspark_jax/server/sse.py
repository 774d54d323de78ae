"""Responses that end when their client does: server-sent events, and plain JSON that takes a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from dspark_jax.server.protocol import ApiError, internal_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """The client has closed its connection: there is nobody left to answer."""


def event(payload: object) -> bytes:
    """One server-sent event with ``payload`` as JSON."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work``, cancelling it when the client disconnects. Raises ``ClientDisconnected`` then.

    Needs a request whose body has been read. Web frameworks do this for streams at best; a plain handler would run to
    its end for nobody.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        # Cancelling is a request: what it sets off (aborting in the engine) has happened when we return.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends ``events`` as they come, and ends with an error event if they raise.

    ``close`` is awaited at the end, whatever the end: also when the client disconnects before the first event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], Awaitable[None]]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # Response has counted its empty body
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnected:
            logger.info("the client of a stream has disconnected")
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for data in events:
                    await body(data)
            except ApiError as error:
                await body(event(error.body()))
            except Exception:
                # The status line is long gone: the error is the stream's last event.
                logger.exception("a stream failed")
                await body(event(internal_error().body()))
            await body(b"", more=False)


def disconnected_response() -> Response:
    """What a handler returns to a client that is gone (nginx's status for it)."""
    return Response(status_code=499)
