"""Runs the application in a uvicorn server until a signal ends it."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to an address but not listening: connections are refused until the server runs.

    Port 0 takes a free one. Raises ``OSError`` if the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def make_server(app: FastAPI, *, shutdown_timeout_s: int = 10) -> uvicorn.Server:
    """A server for ``app``. At shutdown open requests have ``shutdown_timeout_s`` seconds, then they are cut off."""
    return uvicorn.Server(
        uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=shutdown_timeout_s)
    )


def serve_forever(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM, then shuts down gracefully and returns."""
    with _signals_end_quietly():
        server.run(sockets=[listener])


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    # uvicorn handles the signals itself, and at the end raises them once more for whoever handled them before.
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
