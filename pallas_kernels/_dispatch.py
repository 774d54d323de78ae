"""Choosing an implementation of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


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
            return function(*args, **kwargs)
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
