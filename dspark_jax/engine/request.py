"""What goes into the engine and what comes out of a step."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from dspark_jax.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended. ``STOP``: an end token or a stop; ``LENGTH``: max_tokens or the context limit."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestError(ValueError):
    """The engine cannot take this request. ``parameter`` names the field at fault, if one is."""

    def __init__(self, message: str, parameter: str | None = None):
        super().__init__(message)
        self.parameter = parameter


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to generate. ``choice`` tells apart several samples of one prompt: it salts the random streams."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    choice: int = 0


def check_prompt(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Raises ``RequestError`` for a prompt that no engine of these limits can serve."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty: expected at least one token", "prompt")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; max_model_len {max_model_len} leaves room for at most "
            f"{max_model_len - 1}",
            "prompt",
        )
    bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"prompt token id {bad} is outside the vocabulary [0, {vocab_size})", "prompt")


@dataclasses.dataclass(frozen=True)
class RequestUpdate:
    """What one step did for one request.

    ``new_token_ids`` are the tokens committed by this step (several under speculation), already cut at an end token,
    a stop token id or the length limit. ``stop_token_id`` is the token that ended the request, when one did; it is the
    last of ``new_token_ids``. ``num_drafted`` and ``num_accepted`` count this step's verified and accepted drafts;
    ``num_cached_tokens`` is how many tokens of the prompt came from the prefix cache.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached_tokens: int = 0


class EngineCore(Protocol):
    """The part of the engine that text and server layers talk to. Calls come from one thread only.

    ``testing.ScriptedEngine`` implements it without a model.
    """

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int: ...

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises ``RequestError`` if it can never be served (empty or too long a prompt, bad ids)."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is and frees its slot and pages. Unknown ids are ignored. Emits no update."""
        ...

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    def step(self) -> list[RequestUpdate]:
        """Runs one step. An empty list is normal: results come back one step late."""
        ...

    def counters(self) -> dict[str, float]:
        """Readable counters: running, waiting, free_pages, compiles_after_ready, accepted per position, ..."""
        ...
