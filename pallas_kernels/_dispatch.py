"""Choosing an implementation of an operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# What `dispatch` chose, by operation: names of implementations, each with the reasons of those before it.
_choices: dict[str, dict[str, str]] = {}


def choices() -> dict[str, dict[str, str]]:
    """The implementations that each operation got in this process so far, with the reasons why others did not take
    the case (empty where the first one did)."""
    return {op: dict(found) for op, found in sorted(_choices.items())}


def describe_choices() -> list[str]:
    """A line for each operation: who computes it, and why not the others."""
    lines = []
    for op, found in choices().items():
        parts = [f"{name} ({reason})" if reason else name for name, reason in found.items()]
        lines.append(f"{op}: {', '.join(parts)}")
    return lines


def on_hopper(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, or ``NotImplementedError`` where the default device is no GPU of compute capability 9.0."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", None)
        if device.platform != "gpu" or str(capability) != "9.0":
            got = device.platform + (f" {capability}" if capability else "")
            raise NotImplementedError(f"needs a GPU of compute capability 9.0, got {got}")
        return function(*args, **kwargs)

    return guarded


def dispatch(
    op: str, implementations: Mapping[str, Callable[..., Any]], implementation: str | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls the first implementation that takes the case, or exactly the one that is named.

    An implementation that cannot take a case raises ``NotImplementedError`` with the reason; then the next one is
    tried, in the order of ``implementations``. With a named implementation there is no fallback: its
    ``NotImplementedError`` reaches the caller. Raises ``ValueError`` for an unknown name, and ``NotImplementedError``
    with every reason if none takes the case.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"{op}: implementation must be one of {list(implementations)}, got {implementation!r}")
        return implementations[implementation](*args, **kwargs)
    reasons = []
    for name, function in implementations.items():
        try:
            result = function(*args, **kwargs)
            _choices.setdefault(op, {})[name] = "; ".join(reasons)
            return result
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"{op}: no implementation takes this case: {'; '.join(reasons)}")


def require_shape(op: str, name: str, array: Any, shape: tuple[int | None, ...]) -> None:
    """Raises ``ValueError`` unless ``array`` has ``shape`` (``None`` matches any size)."""
    got = tuple(array.shape)
    if len(got) != len(shape) or any(want is not None and want != size for want, size in zip(shape, got, strict=True)):
        expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{op}: {name} must have shape {expected}, got {list(got)}")


def require_integer(op: str, **arrays: Any) -> None:
    """Raises ``TypeError`` unless every array holds integers."""
    for name, array in arrays.items():
        if array.dtype.kind not in "iu":
            raise TypeError(f"{op}: {name} must hold integers, got {array.dtype}")


def require_float(op: str, **arrays: Any) -> None:
    """Raises ``TypeError`` unless every array holds float32 or bfloat16."""
    for name, array in arrays.items():
        if str(array.dtype) not in ("float32", "bfloat16"):
            raise TypeError(f"{op}: {name} must be float32 or bfloat16, got {array.dtype}")
