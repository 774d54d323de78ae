"""Answers a generation request, streamed or whole, in the words of its endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import fastapi
import orjson
from fastapi import Response

from dspark_jax.engine.output import OutputPiece
from dspark_jax.engine.request import FinishReason
from dspark_jax.server.generation import Generation, Service, new_response_id, now
from dspark_jax.server.protocol import GenerationBody
from dspark_jax.server.sse import (
    DONE,
    ClientDisconnected,
    EventStream,
    disconnected_response,
    event,
    unless_disconnected,
)


class Writer(Protocol):
    """How one endpoint writes choices down. It may keep state for each choice."""

    id_prefix: str
    object_name: str
    chunk_name: str
    prompt_field: str

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Streamed choices to send before any text."""
        ...

    def streamed(self, index: int, piece: OutputPiece) -> list[dict[str, Any]]:
        """Streamed choices for the next piece; none while text is held back."""
        ...

    def whole(self, index: int, text: str, finish_reason: FinishReason) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        ...


async def respond(
    service: Service,
    http: fastapi.Request,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    writer: Writer,
) -> Response:
    """Runs ``prompts`` with the sampling of ``body`` and returns the response.

    A client that disconnects, streaming or not, aborts its requests. Raises ``ApiError`` before anything is sent.
    """
    response_id = new_response_id(writer.id_prefix)
    generation = await Generation.start(
        service, response_id, prompts, body.sampling(), body.n or 1, parameter=writer.prompt_field
    )
    head = {"id": response_id, "object": writer.object_name, "created": now(), "model": service.model_name}
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        head["object"] = writer.chunk_name
        return EventStream(_events(generation, writer, head, include_usage), generation.aclose)
    try:
        answer = await unless_disconnected(http.receive, _answer(generation, writer, head))
    except ClientDisconnected:
        return disconnected_response()
    finally:
        await generation.aclose()
    return Response(orjson.dumps(answer), media_type="application/json")


async def _events(
    generation: Generation, writer: Writer, head: dict[str, Any], include_usage: bool
) -> AsyncGenerator[bytes]:
    # With usage asked for, every chunk carries the field and only the last one, without choices, a value.
    tail = {"usage": None} if include_usage else {}
    for index in range(generation.num_choices):
        for choice in writer.opening(index):
            yield event({**head, "choices": [choice], **tail})
    async for index, piece in generation.pieces():
        for choice in writer.streamed(index, piece):
            yield event({**head, "choices": [choice], **tail})
    if include_usage:
        yield event({**head, "choices": [], "usage": generation.usage()})
    yield DONE


async def _answer(generation: Generation, writer: Writer, head: dict[str, Any]) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(generation.num_choices)]
    reasons: dict[int, FinishReason] = {}
    async for index, piece in generation.pieces():
        texts[index].append(piece.text)
        if piece.finish_reason is not None:
            reasons[index] = piece.finish_reason
    choices = [writer.whole(index, "".join(text), reasons[index]) for index, text in enumerate(texts)]
    return {**head, "choices": choices, "usage": generation.usage()}
