"""How many drafts a request gets: the configured depth, a schedule by batch size, and a limit per step.

0 is a depth like any other (nothing is drafted), ``None`` stands for "not given"; mixing them up makes an engine draft
at full depth when it was told not to draft (serving contracts, section 4.6).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from dspark_jax.config import ConfigError


def limit_drafts[T: (np.ndarray, jax.Array)](drafts: T, depth: int) -> T:
    """The first ``depth`` columns of drafts ``[R, K]`` (or of anything per draft): ``[R, 0]`` at depth 0."""
    return drafts[:, :depth]


@dataclasses.dataclass(frozen=True)
class DepthSchedule:
    """Depth by number of running requests: ``ranges`` holds (largest number, depth), ascending; the last has no end."""

    ranges: tuple[tuple[float, int], ...]

    @classmethod
    def create(cls, pairs: Sequence[tuple[int, int]] | None, max_depth: int) -> DepthSchedule:
        """A schedule, or one range of ``max_depth`` for ``None``. Beyond the last pair nothing is drafted.

        Raises ``ConfigError`` for a depth above ``max_depth``.
        """
        if pairs is None:
            return cls(((math.inf, max_depth),))
        for end, depth in pairs:
            if depth > max_depth:
                raise ConfigError(
                    f"depth_schedule must draft at most num_speculative_tokens {max_depth}, got {depth} for up to "
                    f"{end} requests"
                )
        return cls((*pairs, (math.inf, 0)))

    def depth(self, num_seqs: int) -> int:
        return next(depth for end, depth in self.ranges if num_seqs <= end)
