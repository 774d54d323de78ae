"""``POST /v1/completions``: text or token ids in, text out."""

from __future__ import annotations

from typing import Any

import fastapi
from fastapi import APIRouter, Response

from dspark_jax.engine.output import OutputPiece
from dspark_jax.engine.request import FinishReason
from dspark_jax.server.generation import Service, tokenize
from dspark_jax.server.protocol import CompletionBody
from dspark_jax.server.respond import respond


class CompletionWriter:
    """Choices as text."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"
    prompt_field = "prompt"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def streamed(self, index: int, piece: OutputPiece) -> list[dict[str, Any]]:
        if not piece.text and piece.finish_reason is None:
            return []
        return [self._choice(index, piece.text, piece.finish_reason)]

    def whole(self, index: int, text: str, finish_reason: FinishReason) -> dict[str, Any]:
        return self._choice(index, text, finish_reason)

    def _choice(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(body: CompletionBody, http: fastapi.Request) -> Response:
        body.check_fields(service.model_name, service.max_choices)
        prompts = [p if isinstance(p, list) else await tokenize(service, p, "prompt") for p in body.prompt]
        return await respond(service, http, body, prompts, CompletionWriter())

    return routes
