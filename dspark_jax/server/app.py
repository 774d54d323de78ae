"""The HTTP application: routes, errors and limits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_jax.engine.async_engine import AsyncEngine, EngineUnavailableError
from dspark_jax.server import chat, completions, metrics
from dspark_jax.server.generation import Service, now, unavailable
from dspark_jax.server.protocol import ApiError, bad_request, internal_error, validation_error
from dspark_jax.text.encoding_strings import BUILT_IN_STRINGS, EncodingStrings
from dspark_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    strings: EncodingStrings = BUILT_IN_STRINGS,
    max_choices: int = 16,
    max_body_bytes: int = 8 * 2**20,
) -> FastAPI:
    """The OpenAI-compatible application: ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models``, ``/health``,
    ``/metrics``.

    ``model_name`` is the only model that clients may name; ``strings`` are its checkpoint's prompt texts.
    ``max_choices`` bounds ``n``; a body of more than ``max_body_bytes`` is refused. The application starts ``engine``
    and stops it at the end; how long requests in flight may take then is for the HTTP server to decide. Every error
    is OpenAI's JSON error object.
    """
    service = Service(engine, tokenizer, model_name, max_choices, started=now(), strings=strings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(title="dspark-jax", lifespan=lifespan)
    app.add_middleware(BodyGuard, max_body_bytes=max_body_bytes)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(EngineUnavailableError, _on_unavailable)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    app.include_router(chat.router(service))
    app.include_router(completions.router(service))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while requests can be served, otherwise 503 with the reason."""
        engine.check_health()
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """The engine's counters for Prometheus. 503 while there is no engine to ask."""
        return Response(metrics.render(await engine.counters()), media_type=metrics.CONTENT_TYPE)

    model = {"id": model_name, "object": "model", "created": service.started, "owned_by": "dspark-jax"}
    model["max_model_len"] = engine.max_model_len

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, object]:
        if name != model_name:
            raise ApiError(404, f"the model {name!r} does not exist", parameter="model", code="model_not_found")
        return model

    return app


class BodyGuard:
    """Refuses bodies that are too large (413) or do not say that they are JSON (415) before they are parsed."""

    def __init__(self, app: ASGIApp, max_body_bytes: int):
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        length = headers.get(b"content-length", b"0")
        if media_type != b"application/json":
            error = ApiError(415, "expected the header Content-Type: application/json", code="unsupported_media_type")
            await _render(error)(scope, receive, send)
        elif length.isdigit() and int(length) > self._max_body_bytes:
            await _render(self._too_large())(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                # The framework passes on this kind of exception, any other is lost in its parser.
                raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_body_bytes} bytes", code="body_too_large")


def _render(error: ApiError) -> Response:
    return Response(orjson.dumps(error.body()), error.status, error.headers, media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _render(error)


async def _on_unavailable(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineUnavailableError)
    return _render(unavailable(error))


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _render(validation_error(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _render(ApiError(404, f"no such path: {request.url.path}", code="not_found"))
    if error.status_code == 400:
        return _render(bad_request("the body cannot be read as JSON"))
    return _render(ApiError(error.status_code, str(error.detail), headers=error.headers))


async def _on_bug(_: Request, error: Exception) -> Response:
    # The framework logs the traceback after this answer.
    return _render(internal_error())
