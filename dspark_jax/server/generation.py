"""The one way from prompts to text: chat and plain completions differ only in how they write it down."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from dspark_jax.engine.async_engine import AsyncEngine, EngineOverloadedError, EngineUnavailableError, RequestStream
from dspark_jax.engine.output import OutputAssembler, OutputPiece
from dspark_jax.engine.request import FinishReason, Request, RequestError
from dspark_jax.sampling_params import SamplingParams
from dspark_jax.server.protocol import ApiError, bad_request
from dspark_jax.text.encoding_strings import BUILT_IN_STRINGS, EncodingStrings
from dspark_jax.text.tokenizer import Segment, Tokenizer, TokenizerError

RETRY_AFTER_S = 1
# Longer text is tokenised in a worker thread so that other clients' tokens keep flowing.
_INLINE_TOKENISE_CHARS = 8192


@dataclasses.dataclass(frozen=True)
class Service:
    """What every endpoint needs. ``max_choices`` bounds ``n``."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    model_name: str
    max_choices: int
    started: int
    strings: EncodingStrings = BUILT_IN_STRINGS


def unavailable(error: EngineUnavailableError) -> ApiError:
    """503; with ``Retry-After`` when the engine is only full."""
    if isinstance(error, EngineOverloadedError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), code="overloaded", headers=headers)
    return ApiError(503, str(error), code="engine_unavailable")


async def tokenize(service: Service, prompt: str | Sequence[Segment], parameter: str) -> list[int]:
    """Token ids of text or of a rendered conversation. Raises ``ApiError`` for text that is not valid Unicode."""
    tokenizer = service.tokenizer

    def encode() -> list[int]:
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_segments(prompt)

    length = len(prompt) if isinstance(prompt, str) else sum(len(segment.text) for segment in prompt)
    try:
        if length <= _INLINE_TOKENISE_CHARS:
            return encode()
        return await asyncio.to_thread(encode)
    except TokenizerError as error:
        raise bad_request(f"{parameter}: {error}", parameter) from None


class Generation:
    """The choices of one HTTP request: ``n`` for each prompt, numbered prompt by prompt.

    Whoever starts one must ``aclose`` it: that aborts what has not ended.
    """

    def __init__(self, service: Service, stream: RequestStream, requests: Sequence[Request], num_prompt_tokens: int):
        self._stream = stream
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._assemblers = [OutputAssembler(service.tokenizer, request.sampling) for request in requests]
        self._num_prompt_tokens = num_prompt_tokens
        # Of each prompt the first choice counts: the others find what it has just computed.
        self._cached_tokens = {request.request_id: 0 for request in requests if request.choice == 0}

    @classmethod
    async def start(
        cls,
        service: Service,
        response_id: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        n: int,
        parameter: str,
    ) -> Generation:
        """Hands the prompts to the engine. ``parameter`` is the body's field that they came from.

        Raises ``ApiError``: 400 for prompts that can never be served, 503 if the engine is full or down.
        """
        engine = service.engine
        for prompt in prompts:
            _check_prompt(prompt, engine, parameter)
        bad = next((token for token in sampling.stop_token_ids if token >= engine.vocab_size), None)
        if bad is not None:
            raise bad_request(
                f"stop_token_ids: {bad} is outside the vocabulary [0, {engine.vocab_size})", "stop_token_ids"
            )
        if len(prompts) * n > engine.max_in_flight:
            raise bad_request(
                f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} choices; "
                f"this server takes at most {engine.max_in_flight} at once",
                "n",
            )
        requests = [
            Request(f"{response_id}-{i * n + choice}", tuple(prompt), sampling, choice)
            for i, prompt in enumerate(prompts)
            for choice in range(n)
        ]
        try:
            stream = await engine.submit(requests)
        except RequestError as error:
            raise bad_request(str(error), error.parameter) from None
        except EngineUnavailableError as error:
            raise unavailable(error) from None
        return cls(service, stream, requests, sum(map(len, prompts)))

    @property
    def num_choices(self) -> int:
        return len(self._assemblers)

    async def pieces(self) -> AsyncGenerator[tuple[int, OutputPiece]]:
        """``(index, piece)`` of all choices as text comes; the last piece of each choice has a finish reason.

        Raises ``ApiError`` if the engine ends a request with an error.
        """
        async for update in self._stream:
            match update.finish_reason:
                case FinishReason.ERROR:
                    raise ApiError(500, update.error or "the engine could not go on", code="engine_error")
                case FinishReason.ABORT:
                    raise ApiError(503, update.error or "the request was aborted", code="aborted")
            index = self._index[update.request_id]
            if update.request_id in self._cached_tokens:
                self._cached_tokens[update.request_id] = update.num_cached_tokens
            piece = self._assemblers[index].push(update)
            if piece.finish_reason is not None:
                self._stream.abort(update.request_id)  # at a stop string, which the engine knows nothing of
            yield index, piece

    async def aclose(self) -> None:
        await self._stream.aclose()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: every prompt once, every choice's tokens including the one that ended it."""
        completion = sum(assembler.num_tokens for assembler in self._assemblers)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }


def new_response_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Unix time in seconds, as OpenAI's ``created``."""
    return int(time.time())


def _check_prompt(prompt: Sequence[int], engine: AsyncEngine, parameter: str) -> None:
    if not prompt:
        raise bad_request("the prompt is empty: expected at least one token", parameter)
    limit = engine.max_model_len
    if len(prompt) >= limit:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens; this model's context of {limit} tokens (prompt and output) leaves "
            f"room for at most {limit - 1}",
            parameter,
            "context_length_exceeded",
        )
    bad = next((token for token in prompt if not 0 <= token < engine.vocab_size), None)
    if bad is not None:
        raise bad_request(f"token id {bad} is outside the vocabulary [0, {engine.vocab_size})", parameter)
