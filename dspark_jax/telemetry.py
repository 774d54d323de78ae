"""Observability that needs no server: a count of XLA compilations and progress bars."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from tqdm import tqdm

_BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_compiles = 0


def _on_duration(event: str, duration_secs: float, **kwargs: Any) -> None:
    global _compiles
    if event == _BACKEND_COMPILE_EVENT:
        with _lock:
            _compiles += 1


jax.monitoring.register_event_duration_secs_listener(_on_duration)


def compile_count() -> int:
    """XLA compilations in this process since ``dspark_jax.telemetry`` was imported."""
    with _lock:
        return _compiles


def progress[T](items: Iterable[T], *, description: str, total: int | None = None, enabled: bool = True) -> Iterator[T]:
    """``items`` with a progress bar on stderr (none when ``enabled`` is false)."""
    yield from tqdm(items, desc=description, total=total, disable=not enabled, leave=False)
