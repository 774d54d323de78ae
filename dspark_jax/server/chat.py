"""``POST /v1/chat/completions``: messages in, an assistant's message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import fastapi
from fastapi import APIRouter, Response

from dspark_jax.engine.output import OutputPiece
from dspark_jax.engine.request import FinishReason
from dspark_jax.server.generation import Service, tokenize
from dspark_jax.server.protocol import ChatBody, bad_request
from dspark_jax.server.reasoning import ReasoningSplitter, SplitText
from dspark_jax.server.respond import respond
from dspark_jax.text.encoding import EncodingError, encode_messages


class ChatWriter:
    """Choices as messages; in thinking mode ``reasoning_content`` holds what comes before the answer."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, thinking: bool, num_choices: int):
        self._thinking = thinking
        self._splitters = [ReasoningSplitter(thinking) for _ in range(num_choices)]

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def streamed(self, index: int, piece: OutputPiece) -> list[dict[str, Any]]:
        parts = [self._splitters[index].push(piece.text)]
        if piece.finish_reason is not None:
            parts.append(self._splitters[index].flush())
        chunks = [self._chunk(index, delta) for delta in map(self._delta, parts) if delta]
        if piece.finish_reason is not None:
            chunks.append(self._chunk(index, {}, piece.finish_reason))
        return chunks

    def whole(self, index: int, text: str, finish_reason: FinishReason) -> dict[str, Any]:
        splitter = self._splitters[index]
        reasoning, content = map("".join, zip(splitter.push(text), splitter.flush(), strict=True))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._thinking:
            message["reasoning_content"] = reasoning
            message["content"] = content or None  # thinking that was cut short has no answer
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def _delta(self, part: SplitText) -> dict[str, str]:
        fields = {"reasoning_content": part.reasoning, "content": part.content}
        return {name: text for name, text in fields.items() if text}

    def _chunk(self, index: int, delta: dict[str, str], finish_reason: FinishReason | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _check_roles(messages: Sequence[Any]) -> None:
    """Raises ``EncodingError`` for a conversation that leaves the model nothing to answer, or has an internal role."""
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    if "developer" in roles:
        raise EncodingError(f"messages[{roles.index('developer')}].role: 'developer' is not served: expected 'system'")
    if roles and roles[-1] in ("system", "assistant") and not messages[-1].get("wo_eos"):
        raise EncodingError(f"the last message must be from 'user' or 'tool', got {roles[-1]!r}: nothing to answer")


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: fastapi.Request) -> Response:
        body.check_fields(service.model_name, service.max_choices)
        thinking, effort = body.thinking_mode()
        try:
            _check_roles(body.messages)
            prompt = encode_messages(body.messages, thinking=thinking, effort=effort, strings=service.strings)
        except EncodingError as error:
            raise bad_request(str(error), "messages") from None
        token_ids = await tokenize(service, prompt, "messages")
        return await respond(service, http, body, [token_ids], ChatWriter(thinking, body.n or 1))

    return routes
