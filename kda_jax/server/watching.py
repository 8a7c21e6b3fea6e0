"""The endpoints for who wonders what the server does: the page, what it polls, and why a prompt was no hit."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

import numpy as np
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from kda_jax.engine import Statistics
from kda_jax.server import prompts, words
from kda_jax.server.connection import read
from kda_jax.server.errors import ApiError, bad_field
from kda_jax.server.keys import Tenant
from kda_jax.server.plain import plain
from kda_jax.server.requests import ExplainRequest
from kda_jax.server.serving import Serving, serving_of, tenant_of

MOST_NODES = 500
PAGE = files("kda_jax.server").joinpath("page.html").read_text(encoding="utf-8")


def _policy(page: str) -> str:
    """What the page may do: run its own script, and speak to this server."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL)
    }
    return (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS = {"Content-Security-Policy": _policy(PAGE), "X-Content-Type-Options": "nosniff"}


async def page(request: Request) -> Response:
    """GET /: the page. It holds nothing of anybody; what it shows it asks for with the key it is given."""
    return HTMLResponse(PAGE, headers=HEADERS)


async def live(request: Request) -> Response:
    """GET /live: requests, checkpoints and rates, as far as the tenant may see them."""
    serving, tenant = serving_of(request), tenant_of(request)
    seen: dict[str, Any] = {
        "model": serving.name,
        "draining": serving.draining,
        "tenant": tenant.name,
        "operator": tenant.operator,
        "open": serving.keys.open,
        "requests": serving.live.rows(tenant),
        "rates": serving.history.rows(tenant),
        "tree": plain(await run_in_threadpool(serving.engine.tree, MOST_NODES, tenant=seen_of(tenant))),
    }
    if tenant.operator:
        seen["engine"] = _figures(await run_in_threadpool(serving.engine.statistics))
    return JSONResponse(seen)


def _figures(statistics: Statistics) -> dict[str, Any]:
    """An engine's numbers, with the quantiles of its times in place of these."""
    figures = plain(statistics)
    for name in ("first_token", "per_token", "step"):
        recent = figures[name].pop("recent")
        p50, p99 = np.quantile(recent, (0.5, 0.99)).tolist() if recent else (None, None)
        figures[name] |= {"recent_p50": p50, "recent_p99": p99}
    return figures


def seen_of(tenant: Tenant) -> str | None:
    """Whose checkpoints a tenant may see: his salt, None for everybody's."""
    return None if tenant.operator else tenant.salt


async def explain(request: Request) -> Response:
    """GET /explain?prompt=TEXT, or POST with the body of a completion or a chat."""
    serving, tenant = serving_of(request), tenant_of(request)
    if request.method == "POST":
        async with read(request, ExplainRequest, serving) as asked:
            return await _explained(serving, tenant, asked)
    try:
        asked = ExplainRequest.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise bad_field(error) from None
    return await _explained(serving, tenant, asked)


async def _explained(serving: Serving, tenant: Tenant, asked: ExplainRequest) -> Response:
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "prompt: give a prompt, or messages, and not both", param="prompt")
    if asked.prompt is not None and len(asked.prompt) != 1:
        raise ApiError(400, f"prompt: one at a time is explained, got {len(asked.prompt)}", param="prompt")
    if asked.prompt is not None:
        (tokens,) = await serving.prepare(prompts.of_prompts, serving, asked.prompt)
    else:
        tokens = await serving.prepare(prompts.of_messages, serving, asked.messages or [])
    whose = tenant if asked.tenant is None else _named(serving, tenant, asked.tenant)
    found = await run_in_threadpool(serving.engine.explain, tokens, tenant=whose.salt)
    return JSONResponse({"words": words.of(found), **plain(found)})


def _named(serving: Serving, tenant: Tenant, name: str) -> Tenant:
    """The tenant of a name, for who may ask about him: an operator, and he himself."""
    if name != tenant.name and not tenant.operator:
        raise ApiError(
            403, "tenant: this takes the key of an operator", param="tenant", code="not_an_operator"
        )
    found = serving.keys.named(name)
    if found is None:
        raise ApiError(400, f"tenant: no tenant {name!r} here", param="tenant")
    return found


async def metrics(request: Request) -> Response:
    """GET /metrics: for Prometheus. They count everybody's requests: with keys, an operator's is needed."""
    operator_of(request)
    serving = serving_of(request)
    body, kind = await run_in_threadpool(serving.metrics.render, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": kind})


def operator_of(request: Request) -> None:
    """Raises:
    ApiError: 401 without a key, 403 with one that is no operator's.
    """
    if not tenant_of(request).operator:
        raise ApiError(403, "this takes the key of an operator", code="not_an_operator")
