"""Measuring kernels on a GPU: device time, over inputs that rotate past the L2 cache."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# Rates of one H200 that floors are computed from: a device copy, and a large bfloat16 product.
BYTES_PER_US = 4.3e6
FLOPS_PER_US = 790e6
_L2_BYTES = 60 << 20
_MOST_SETS = 48


@dataclasses.dataclass(frozen=True)
class Case:
    """A named shape with inputs.

    ``function(implementation, **options)`` gives a function of one member of ``sets``; the members together are larger
    than the L2 cache. ``floor_us`` is the time below which no kernel gets on the device that the rates belong to.
    ``tolerance`` bounds the relative root-mean-square difference between implementations. ``peer`` names the case in
    a peer's results: the items that the right record has.
    """

    name: str
    sets: Sequence[Any]
    function: Callable[..., Callable[[Any], Any]]
    floor_us: float
    tolerance: float
    peer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""


def rotations(set_bytes: int) -> int:
    """Sets of inputs needed to outgrow the L2 cache, at least three and at most 48 (of the smallest shapes)."""
    return min(_MOST_SETS, max(3, -(-2 * _L2_BYTES // set_bytes)))


def device_time_us(function: Callable[[Any], Any], sets: Sequence[Any], repeats: int = 5) -> float:
    """Median over ``repeats`` of the mean time that the GPU spends in the kernels of one call.

    From CUPTI's activity records: kernels only, neither launches nor the gaps between them. Raises ``RuntimeError``
    where the profiler saw no kernel.
    """
    from jax.experimental.mosaic.gpu import profiler  # only where there is a GPU

    every = jax.jit(lambda sets: [function(one) for one in sets])
    _, times = profiler.measure(every, aggregate=True, iterations=repeats)(list(sets))
    if times is None:
        raise RuntimeError("the profiler saw no kernel")
    return statistics.median(times) * 1e3 / len(sets)


def relative_error(got: Any, want: Any) -> float:
    """Root-mean-square difference relative to ``want``, in float64. NaN where either is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(((got - want) ** 2).sum() / (want**2).sum()))
