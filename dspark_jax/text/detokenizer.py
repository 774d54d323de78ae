"""Token ids to text as they arrive, whole characters only."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dspark_jax.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of tokens into a stream of text that never contains half a character.

    A byte-level token may end inside a UTF-8 sequence. Such bytes wait for the next token; bytes that can no longer
    become a character are U+FFFD at once, and those still waiting at the end are U+FFFD at ``flush``. All pushes and
    the flush joined are ``bytes_of_all_tokens.decode("utf-8", errors="replace")``, however the tokens were grouped.
    The work per token is that of its own bytes: nothing is decoded twice.

    ``skip_special_tokens`` leaves out ``tokenizer.special_ids``.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        kept = (self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skipped)
        return self._decoder.decode(b"".join(kept))

    def flush(self) -> str:
        """The text of bytes still waiting: U+FFFD if there are any. The stream may then start afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
