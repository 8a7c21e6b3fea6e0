"""The endpoints of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kda_jax.server import prompts
from kda_jax.server.answer import Answer
from kda_jax.server.connection import read, unless_gone
from kda_jax.server.delivery import Events, Whole
from kda_jax.server.door import length_of, length_of_messages
from kda_jax.server.errors import ApiError
from kda_jax.server.forms import ChatForm, TextForm
from kda_jax.server.requests import Asked, ChatRequest, CompletionRequest
from kda_jax.server.serving import Serving, serving_of, tenant_of

COMPLETION_TOKENS = 16
"""Tokens that a completion generates if it does not say."""


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    return await _respond(request, await _completion(request))


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await _respond(request, await _chat(request))


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


async def _completion(request: Request) -> Answer:
    serving, tenant = serving_of(request), tenant_of(request)
    serving.check_open()
    async with read(request, CompletionRequest, serving) as asked:
        serving.check_model(asked.model)
        _check_choices(serving, asked, len(asked.prompt))
        with _passing(serving, asked, *length_of(asked.prompt)):
            found = await serving.prepare(prompts.of_prompts, serving, asked.prompt)
            rooms = [
                prompts.room(serving, len(ids), asked.max_tokens, COMPLETION_TOKENS, "max_tokens")
                for ids in found
            ]
            form = TextForm(serving.tokenizer, asked.top_logprobs_asked or 0)
            return Answer(serving, tenant, asked.without_prompt(), found, rooms, form)


async def _chat(request: Request) -> Answer:
    serving, tenant = serving_of(request), tenant_of(request)
    serving.check_open()
    async with read(request, ChatRequest, serving) as asked:
        serving.check_model(asked.model)
        _check_choices(serving, asked, 1)
        with _passing(serving, asked, *length_of_messages(asked.messages)):
            ids = await serving.prepare(prompts.of_messages, serving, asked.messages)
            param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
            room = prompts.room(serving, len(ids), asked.most_new_tokens, serving.limits.new_tokens, param)
            form = ChatForm(serving.tokenizer, asked.top_logprobs_asked or 0)
            return Answer(serving, tenant, asked.without_prompt(), [ids], [room], form)


def _passing(serving: Serving, asked: Asked, kind: str, length: int) -> AbstractContextManager[None]:
    """Several continuations say nothing about one, and one says nothing about several."""
    several = (asked.n or 1) > 1
    return nullcontext() if several else serving.door.passing(kind, length)


def _check_choices(serving: Serving, asked: Asked, count: int) -> None:
    n, most = asked.n or 1, serving.limits.choices
    if count * n > most:
        message = f"n: {n} continuations of {count} prompts; all together may be {most}"
        raise ApiError(400, message, param="n")


async def _respond(request: Request, answer: Answer) -> Response:
    if answer.streams:
        return Events(answer)
    try:
        whole = await unless_gone(request, answer.whole())
    finally:
        answer.close()
    return Response() if whole is None else Whole(whole)
