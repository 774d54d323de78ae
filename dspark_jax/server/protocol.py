"""What clients may send: request bodies as pydantic models, and the errors they get back.

Fields are those of the OpenAI API and the usual additions of open engines (``top_k``, ``ignore_eos``, ...). A field
that this server does not know is an error, and so is one it knows but cannot honour: a request is never served partly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dspark_jax.sampling_params import SamplingParams, SamplingParamsError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_PROMPTS = 256

# Fields that do not change the output: accepted with any value and ignored.
IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)

# Fields that would change the output but are not implemented, and the values that ask for nothing.
UNSUPPORTED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


class ApiError(Exception):
    """An error for the client: HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """OpenAI's error object. Clients choose field and model names, so those are made short and encodable."""
        message, parameter = _printable(self.message), self.parameter and _printable(self.parameter)
        return {"error": {"message": message, "type": self.kind, "param": parameter, "code": self.code}}


def bad_request(message: str, parameter: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, parameter=parameter, code=code)


def internal_error() -> ApiError:
    """What the client hears of a bug; the log has the rest."""
    return ApiError(500, "internal server error", code="internal_error")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; accepted, never sent


class GenerationBody(BaseModel):
    """Fields that chat and plain completions share. Numbers are checked for their range by ``SamplingParams``."""

    # Strict: no "3" for 3, no true for 1. Fields that are not declared are sorted out by ``check_fields``.
    model_config = ConfigDict(strict=True, extra="allow")
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = Field(None, description="Name of the served model; may be left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="Number of choices for each prompt.")
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = Field(None, description="A string or a list of strings.")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stop_in_bounds(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"expected at most {MAX_STOP_STRINGS} stop strings, got {len(value)}")
        if any(len(text) > MAX_STOP_LENGTH for text in value or ()):
            raise ValueError(f"a stop string may have at most {MAX_STOP_LENGTH} characters")
        return value

    def check_fields(self, model_name: str, max_choices: int) -> None:
        """Raises ``ApiError`` for a field that is unknown or not supported, a model that is not served, and ``n``."""
        if self.model is not None and self.model != model_name:
            raise ApiError(
                404,
                f"the model {self.model!r} does not exist; this server serves {model_name!r}",
                parameter="model",
                code="model_not_found",
            )
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED_FIELDS:
                continue
            if name not in UNSUPPORTED_FIELDS:
                raise bad_request(f"unknown field {name!r}", name, "unknown_field")
            if not any(_same(value, neutral) for neutral in UNSUPPORTED_FIELDS[name]):
                raise bad_request(f"{name!r} is not supported by this server", name, "unsupported_field")
        if self.n is not None and not 1 <= self.n <= max_choices:
            raise bad_request(f"n must be in [1, {max_choices}], got {self.n}", "n")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options may be given only with stream: true", "stream_options")

    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises ``ApiError`` naming the field that is out of range."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name in (field.name for field in dataclasses.fields(SamplingParams))
            if (value := getattr(self, name)) is not None
        }
        given.setdefault("max_tokens", self.default_max_tokens)
        try:
            return SamplingParams(**given)
        except SamplingParamsError as error:
            raise bad_request(str(error), error.parameter) from None


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: list[str] | list[list[int]] = Field(description="Text, token ids, or a list of either.")

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _prompt_as_list(cls, value: Any, _handler: object) -> list[str] | list[list[int]]:
        # By hand: pydantic reports one error for every member of a union.
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError("expected text, a list of token ids, or a non-empty list of either")
        if all(_is_int(item) for item in value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"expected at most {MAX_PROMPTS} prompts, got {len(value)}")
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(_is_int(token) for token in item) for item in value):
            return value
        raise ValueError("expected text, a list of token ids, or a list of either; the items must be all of one kind")


class ChatTemplateKwargs(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    thinking: bool | None = None
    enable_thinking: bool | None = None


class ThinkingSwitch(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["enabled", "disabled"]


Effort = Literal["low", "high", "max"]
_EFFORTS: Mapping[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "low",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    thinking: ThinkingSwitch | None = Field(None, description='{"type": "enabled" or "disabled"}, or a boolean.')
    chat_template_kwargs: ChatTemplateKwargs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @field_validator("thinking", mode="before")
    @classmethod
    def _thinking_from_bool(cls, value: Any) -> Any:
        return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value

    def sampling(self) -> SamplingParams:
        if self.max_completion_tokens is None:
            return super().sampling()
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise bad_request(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} disagree",
                "max_completion_tokens",
            )
        try:
            return self.model_copy(
                update={"max_tokens": self.max_completion_tokens, "max_completion_tokens": None}
            ).sampling()
        except ApiError as error:
            if error.parameter == "max_tokens":
                raise bad_request(error.message, "max_completion_tokens") from None
            raise

    def thinking_mode(self) -> tuple[bool, Effort]:
        """Whether the model thinks first, and how hard.

        The first of these that is given decides: ``thinking``, ``chat_template_kwargs`` (``thinking``, then
        ``enable_thinking``), ``reasoning_effort`` (``none`` is off, any other level is on). Without any of them: off.
        Levels: ``minimal``, ``low``, ``medium`` are V4's low (the default), ``xhigh`` and ``max`` its max.
        """
        effort = _EFFORTS.get(self.reasoning_effort or "low", "low")
        if self.thinking is not None:
            return self.thinking.type == "enabled", effort
        template = self.chat_template_kwargs or ChatTemplateKwargs()
        for switch in (template.thinking, template.enable_thinking):
            if switch is not None:
                return switch, effort
        return self.reasoning_effort not in (None, "none"), effort


def validation_error(errors: Sequence[Any]) -> ApiError:
    """One ``ApiError`` from pydantic's list of errors. Values that the client sent are not repeated."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return bad_request(f"the body is not valid JSON: {reason} at character {path[0] if path else 0}")
    parameter = ".".join(map(str, path)) or None
    message = first["msg"].removeprefix("Value error, ")
    if parameter is None:
        return bad_request("the body must be a JSON object" if first["type"] != "missing" else "the body is missing")
    return bad_request(f"{parameter}: {message[:1].lower()}{message[1:]}", parameter)


def _printable(text: str, limit: int = 1000) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[:limit] + "..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _same(value: object, neutral: object) -> bool:
    # 0 == False in Python but not in JSON.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
