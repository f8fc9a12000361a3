"""The endpoints of a server, put together as a FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from foretoken.engine.session import Session
from foretoken.serve.answer import LEFT
from foretoken.serve.answering import UNREAD, Answering
from foretoken.serve.asking import prompts_of
from foretoken.serve.gate import GUARDED, Gate
from foretoken.serve.pages import READ, add_pages
from foretoken.serve.request_log import RequestLog
from foretoken.serve.service import Service
from foretoken.serve.settings import Settings
from foretoken.serve.wire.errors import GONE, Refusal, invalid, late
from foretoken.serve.wire.requests import Asked, ChatRequest, CompletionRequest
from foretoken.serve.wire.schema import describe
from foretoken.serve.wire.unsupported import check_fields
from foretoken.serve.writing import Wants

if TYPE_CHECKING:
    from foretoken.training.online.serving import IdleLearning

LONG_BODY = 1 << 16  # bytes from which on a body is read beside the event loop
A = TypeVar("A", bound=Asked)


def app(
    session: Session, settings: Settings | None = None, learning: IdleLearning | None = None
) -> FastAPI:
    """A server around `session`, for uvicorn, Ray Serve or any other ASGI server.

    Its lifespan runs the steps; neither the session nor what its draft learns is closed by it.
    """
    service = Service(session, settings or Settings(), learning)

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        log = log_of(service)
        if log is not None:
            log.open()
        await service.start()
        try:
            yield
        finally:
            await service.stop()
            if log is not None:
                await asyncio.to_thread(log.close)

    api = FastAPI(title="foretoken", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    api.state.service = service
    api.add_middleware(Gate, service=service)
    add_errors(api, service)
    add_texts(api, service)
    add_state(api, service)
    add_pages(api)
    guarded = GUARDED if service.settings.api_keys else None
    describe(api, service.settings.model_name, guarded)
    return api


def log_of(service: Service) -> RequestLog | None:
    """The request log, where the settings name a file."""
    path = service.settings.log_file

    def failed() -> None:
        service.counts.log_errors += 1

    return None if path is None else RequestLog(None if str(path) == "-" else path, failed)


def add_errors(api: FastAPI, service: Service) -> None:
    """All that can go wrong, as OpenAI clients read it."""

    def told(refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.to_dict(), refusal.status, refusal.headers)

    @api.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        request.scope["foretoken"].facts["error"] = error.code or error.kind
        return told(error)

    @api.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        known = ", ".join(sorted({getattr(route, "path", "") for route in api.routes} - {""}))
        refusal = Refusal(
            f"{request.method} {request.url.path[:200]} was asked for ({error.detail}).",
            f"paths are {known}.",
            "see /docs for what each takes.",
            status=error.status_code,
        )
        request.scope["foretoken"].facts["error"] = refusal.code or refusal.kind
        return JSONResponse(refusal.to_dict(), error.status_code, error.headers)

    @api.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        request.scope["foretoken"].facts["error"] = LEFT
        return Response(status_code=GONE)  # nobody reads it

    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return told(service.blame(error))


def add_texts(api: FastAPI, service: Service) -> None:
    """Completions and chats."""

    @api.post("/v1/completions", summary="Continue texts.")
    async def completions(request: Request) -> Response:
        asked = await read(request, service, CompletionRequest)
        if asked.echo and asked.logprobs is not None:
            raise Refusal(
                "echo was asked for with logprobs.",
                "logarithms are told of new tokens, not of those of a prompt.",
                "leave one of them out.",
                param="echo",
                code="unsupported_parameter",
            )
        return answering(request, service, asked, asked.logprobs)

    @api.post("/v1/chat/completions", summary="Answer a conversation.")
    async def chat(request: Request) -> Response:
        asked = await read(request, service, ChatRequest)
        top = asked.top_logprobs or 0
        if top and not asked.logprobs:
            raise Refusal(
                f"top_logprobs={top} was asked for without logprobs.",
                "top_logprobs are told beside logprobs.",
                "pass logprobs: true, too.",
                param="top_logprobs",
            )
        return answering(request, service, asked, top if asked.logprobs else None)


async def read(request: Request, service: Service, kind: type[A]) -> A:
    """The body of a request, checked; long ones beside the event loop."""
    body = await body_of(request, min(service.settings.request_timeout or UNREAD, UNREAD))

    def checked() -> A:
        try:
            asked = kind.model_validate_json(body)
        except ValidationError as error:
            raise invalid(error.errors(include_url=False, include_input=False)) from error
        check_fields(asked)
        return asked

    if len(body) < LONG_BODY:
        return checked()
    return await asyncio.get_running_loop().run_in_executor(None, checked)


async def body_of(request: Request, limit: float) -> bytes:
    """All of a body; a client that sends nothing more for `limit` seconds is refused."""
    parts, stream = list[bytes](), aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(limit):
                parts.append(await anext(stream))
        except StopAsyncIteration:
            return b"".join(parts)
        except TimeoutError as error:
            raise late(limit) from error


def answering(request: Request, service: Service, asked: Asked, logprobs: int | None) -> Response:
    """The response of a request that is let in."""
    account = request.scope["foretoken"]
    account.user = asked.user or ""
    service.check_model(asked.model)
    pieces, speculation = bool(asked.stream), bool(asked.include_speculation)
    wants = Wants(pieces=pieces, logprobs=logprobs, speculation=speculation and pieces)
    return Answering(service, service.admit(asked, prompts_of(asked), wants, account))


def add_state(api: FastAPI, service: Service) -> None:
    """What the server is, and how it does."""

    def model() -> dict[str, Any]:
        longest = service.session.target.max_length
        promise = service.session.engine.promise
        return {
            "id": service.settings.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "foretoken",
            "max_model_len": longest,
            "foretoken": {
                "method": service.session.method,
                "max_tokens": service.settings.max_tokens_limit,  # of a text; null: no limit
                **promise.to_dict(),
            },
        }

    @api.head("/v1/models", include_in_schema=False)
    @api.get("/v1/models", summary="The model that is served.")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @api.head("/v1/models/{name:path}", include_in_schema=False)
    @api.get("/v1/models/{name:path}", summary="The model of this name.")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model()

    @api.head("/health", include_in_schema=False)
    @api.get("/health", summary="Whether requests are taken: 200, or 503.")
    async def health() -> JSONResponse:
        status = "ok" if service.healthy else "stopping" if service.stopping else "down"
        return JSONResponse({"status": status}, 200 if service.healthy else 503)

    if service.settings.metrics:

        @api.api_route("/metrics", methods=READ, include_in_schema=False)
        async def metrics() -> Response:
            text = generate_latest(service.metrics.registry)
            return Response(text, media_type=CONTENT_TYPE_LATEST)
