"""What is wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LISTED = 40


class CheckpointError(ValueError):
    """A checkpoint cannot be used. ``problems`` lists every reason; the message shows the first of a long list."""

    def __init__(self, what: str, problems: Sequence[str] = ()):
        self.problems = tuple(problems)
        lines = [f"  {problem}" for problem in self.problems[:MAX_LISTED]]
        if len(self.problems) > MAX_LISTED:
            lines.append(f"  ... and {len(self.problems) - MAX_LISTED} more")
        super().__init__("\n".join([f"{what}: {len(self.problems)} problems" if lines else what, *lines]))
