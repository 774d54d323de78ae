"""The text of one request's output: detokenisation and stop strings, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dspark_jax.text.detokenizer import IncrementalDetokenizer
from dspark_jax.text.stop import StopChecker
from dspark_jax.text.tokenizer import Tokenizer


class OutputDelta(NamedTuple):
    """What a group of tokens added.

    ``text`` may be shown now. ``stopped_by`` is the stop string that ended the output, if one has. ``num_tokens_used``
    counts the tokens of this group that belong to the output: all of them, or those up to and including the one that
    completed the stop string. Token ids, log-probabilities, usage and the history kept in the cache end there too.
    """

    text: str
    stopped_by: str | None
    num_tokens_used: int


class OutputText:
    """Feeds committed tokens through the detokenizer and the stop checker.

    A step of speculative decoding commits several tokens at once, and the stop string may be completed by any of them;
    tokens are taken one at a time, so the result is that of a step per token, whatever the groups.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stop = StopChecker(stop, include_stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._stop.stopped_by

    def push(self, token_ids: Sequence[int]) -> OutputDelta:
        """Takes the next group of tokens. After a stop, uses none of them."""
        if self._stop.stopped_by is not None:
            return OutputDelta("", self._stop.stopped_by, 0)
        texts: list[str] = []
        for used, token_id in enumerate(token_ids, start=1):
            text, stopped_by = self._stop.push(self._detokenizer.push((token_id,)))
            texts.append(text)
            if stopped_by is not None:
                return OutputDelta("".join(texts), stopped_by, used)
        return OutputDelta("".join(texts), None, len(token_ids))

    def finish(self) -> OutputDelta:
        """Releases what was held back, when the output ended for another reason. Empty after a stop."""
        # The rest of an unfinished character becomes U+FFFD, which a stop string may contain.
        text, stopped_by = self._stop.push(self._detokenizer.flush())
        return OutputDelta(text + self._stop.flush(), stopped_by, 0)
