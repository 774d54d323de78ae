"""Splits a thinking model's output into reasoning and answer while it streams."""

from __future__ import annotations

from typing import NamedTuple

from dspark_jax.text.special_tokens import END_THINK, THINK


class SplitText(NamedTuple):
    """Text to show now, by channel."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Sends text before the first ``</think>`` to ``reasoning`` and text after it to ``content``.

    For outputs of thinking mode, where the prompt already ends in ``<think>``; one that the model repeats at the very
    beginning is dropped. With ``thinking`` false everything is content. The channels, joined, do not depend on how the
    text was cut. An output that ends before ``</think>`` is all reasoning. Source: model specification, section 6.3.
    """

    def __init__(self, thinking: bool):
        self._in_reasoning = thinking
        self._at_start = True
        self._held = ""

    def push(self, text: str) -> SplitText:
        """The next piece of text. What could be the beginning of a tag waits for more."""
        if not self._in_reasoning:
            return SplitText(content=text)
        text = self._held + text
        if self._at_start:
            if len(text) < len(THINK) and THINK.startswith(text):
                self._held = text
                return SplitText()
            self._at_start = False
            text = text.removeprefix(THINK)
        reasoning, tag, content = text.partition(END_THINK)
        if tag:
            self._in_reasoning = False
            self._held = ""
            return SplitText(reasoning, content)
        safe = len(text) - _overlap(text, END_THINK)
        self._held = text[safe:]
        return SplitText(text[:safe])

    def flush(self) -> SplitText:
        """What was held back, now that no more text will come."""
        held, self._held = self._held, ""
        return SplitText(reasoning=held)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of ``tag`` that ``text`` ends with."""
    return next(n for n in range(min(len(text), len(tag) - 1), -1, -1) if text.endswith(tag[:n]))
