"""The endpoints of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kda_jax.server import prompts
from kda_jax.server.answer import Answer
from kda_jax.server.connection import read, unless_gone
from kda_jax.server.errors import ApiError
from kda_jax.server.forms import ChatForm, Form, TextForm
from kda_jax.server.keys import Tenant
from kda_jax.server.requests import Asked, ChatRequest, CompletionRequest
from kda_jax.server.serving import Serving

COMPLETION_TOKENS = 16
"""Tokens that a completion generates if it does not say."""


def serving_of(request: Request) -> Serving:
    """The server's own."""
    return request.app.state.serving


def tenant_of(request: Request) -> Tenant:
    """Who asks.

    Raises:
        ApiError: 401 without a key that the server takes.
    """
    tenant = serving_of(request).keys.tenant(request.headers.get("authorization", ""))
    if tenant is None:
        message = "no key that this server takes; send the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key")
    return tenant


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    serving, tenant = serving_of(request), tenant_of(request)
    serving.check_open()
    asked = await read(request, CompletionRequest, serving.limits)
    serving.check_model(asked.model)
    found = await run_in_threadpool(prompts.of_prompts, serving, asked.prompt)
    rooms = [
        prompts.room(serving, len(ids), asked.max_tokens, COMPLETION_TOKENS, "max_tokens") for ids in found
    ]
    form = TextForm(serving.tokenizer, asked.top_logprobs_asked or 0)
    return await _respond(request, tenant, asked, found, rooms, form)


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    serving, tenant = serving_of(request), tenant_of(request)
    serving.check_open()
    asked = await read(request, ChatRequest, serving.limits)
    serving.check_model(asked.model)
    ids = await run_in_threadpool(prompts.of_messages, serving, asked.messages)
    param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    room = prompts.room(serving, len(ids), asked.most_new_tokens, serving.limits.new_tokens, param)
    form = ChatForm(serving.tokenizer, asked.top_logprobs_asked or 0)
    return await _respond(request, tenant, asked, [ids], [room], form)


async def models(request: Request) -> Response:
    """GET /v1/models."""
    tenant_of(request)
    return JSONResponse({"object": "list", "data": [_model(serving_of(request))]})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    tenant_of(request)
    serving = serving_of(request)
    serving.check_model(request.path_params["name"])
    return JSONResponse(_model(serving))


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are taken, 503 while draining and when the engine has failed."""
    serving_of(request).check_open()
    return JSONResponse({"status": "ok"})


def _model(serving: Serving) -> Mapping[str, Any]:
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.begun,
        "owned_by": "kda-jax",
        "max_model_len": serving.context,
    }


async def _respond(
    request: Request, tenant: Tenant, asked: Asked, found: list[list[int]], rooms: list[int], form: Form
) -> Response:
    serving = serving_of(request)
    n, most = asked.n or 1, serving.limits.choices
    if len(found) * n > most:
        message = f"n: {n} continuations of {len(found)} prompts; all together may be {most}"
        raise ApiError(400, message, param="n")
    answer = Answer(serving, tenant, asked, found, rooms, form)
    if asked.stream:
        return _Events(answer)
    try:
        whole = await unless_gone(request, answer.whole())
    finally:
        answer.close()
    return Response() if whole is None else JSONResponse(whole)


class _Events(StreamingResponse):
    """An answer as server-sent events. Whatever becomes of the client, the answer is closed."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(
            answer.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
