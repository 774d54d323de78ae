"""Stop strings in streamed text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """``text`` may be shown now; ``stopped_by`` is the stop string that ended the output, if one has."""

    text: str
    stopped_by: str | None


class StopChecker:
    """Watches streamed text for stop strings and holds back what could be the beginning of one.

    The first stop string to be complete ends the output, as it does when text arrives letter by letter; of several
    completed by the same letter the longest wins. So the result does not depend on how the text was cut into pushes.
    Text before the stop string is kept, text after it dropped, the stop string itself kept only with ``include_stop``.

    Raises ``ValueError`` for an empty stop string and ``TypeError`` for a bare string instead of a sequence.
    """

    # An Aho-Corasick automaton. A state is a prefix of some stop string: the longest one that the text so far ends
    # with. That is just what has to be held back, and one table look-up per letter keeps it.

    def __init__(self, stop: Sequence[str] = (), include_stop: bool = False):
        if isinstance(stop, str):
            raise TypeError(f"stop must be a sequence of strings, got the string {stop!r}")
        if not all(stop):
            raise ValueError(f"stop strings must not be empty, got {list(stop)!r}")
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._stopped_by: str | None = None
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest_match: list[str | None] = [None]
        for text in stop:
            self._insert(text)
        self._shorter = [0] * len(self._next)  # the state of the longest proper suffix that is a prefix as well
        self._link()

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output, or None while it goes on."""
        return self._stopped_by

    def push(self, text: str) -> StopResult:
        """Takes the next piece of text. After a stop there is nothing more: further text is dropped."""
        if self._stopped_by is not None:
            return StopResult("", self._stopped_by)
        if len(self._next) == 1:
            return StopResult(text, None)
        seen = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, char)
            match = self._longest_match[self._state]
            if match is not None:
                self._held = ""
                self._stopped_by = match
                return StopResult(seen[: position if self._include_stop else position - len(match)], match)
        safe = len(seen) - self._depth[self._state]
        self._held = seen[safe:]
        return StopResult(seen[:safe], None)

    def flush(self) -> str:
        """The text held back, now that no more will come; empty after a stop."""
        text, self._held, self._state = self._held, "", 0
        return text

    def _insert(self, text: str) -> None:
        state = 0
        for char in text:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._longest_match.append(None)
            state = self._next[state][char]
        self._longest_match[state] = text

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._shorter[child] = self._step(self._shorter[state], char)
                if self._longest_match[child] is None:
                    self._longest_match[child] = self._longest_match[self._shorter[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, 0)
