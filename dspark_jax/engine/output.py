"""From a request's updates to its text: shared by the server and the offline API."""

from __future__ import annotations

import dataclasses

from dspark_jax.engine.request import FinishReason, RequestUpdate
from dspark_jax.sampling_params import SamplingParams
from dspark_jax.text.output_text import OutputText
from dspark_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class OutputPiece:
    """What one update added to the output.

    ``finish_reason`` is set on the last piece; ``stop_reason`` then says which of the request's own stop strings or
    stop token ids ended the output, if one did (not the end token).
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputAssembler:
    """Turns one request's updates into text and ends it at a stop string.

    The token that ended the request (the end token or one of ``stop_token_ids``) counts as output but is not part of
    the text; with ``include_stop_str_in_output`` a stop token's text is kept. A stop string that is complete within the
    tokens delivered wins over the length limit, and tokens after the one that completed it are not part of the output.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams):
        self._sampling = sampling
        self._text = OutputText(tokenizer, sampling.stop, sampling.include_stop_str_in_output)
        self.num_tokens = 0

    def push(self, update: RequestUpdate) -> OutputPiece:
        """The next piece. If it has a finish reason but ``update`` has none, the request is to be aborted."""
        tokens = update.new_token_ids
        own_stop = update.stop_token_id if update.stop_token_id in self._sampling.stop_token_ids else None
        hidden = update.stop_token_id is not None and not (
            self._sampling.include_stop_str_in_output and own_stop is not None
        )
        delta = self._text.push(tokens[:-1] if hidden else tokens)
        text, stopped_by = delta.text, delta.stopped_by
        if stopped_by is None and update.finish_reason is None:
            return self._piece(text, tokens)
        if stopped_by is None:
            rest = self._text.finish()
            text, stopped_by = text + rest.text, rest.stopped_by
        elif delta.num_tokens_used < len(tokens):
            tokens = tokens[: delta.num_tokens_used]
        if stopped_by is not None:
            return self._piece(text, tokens, FinishReason.STOP, stopped_by)
        return self._piece(text, tokens, update.finish_reason, own_stop)

    def _piece(
        self,
        text: str,
        tokens: tuple[int, ...],
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> OutputPiece:
        self.num_tokens += len(tokens)
        return OutputPiece(text, tokens, finish_reason, stop_reason)
