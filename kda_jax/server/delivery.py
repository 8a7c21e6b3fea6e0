"""Answers on their way out, and the place that a request has until then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import request_response
from starlette.types import Receive, Scope, Send

from kda_jax.server.answer import Answer
from kda_jax.server.serving import serving_of, tenant_of


class Placed:
    """An endpoint for those with a key, each of whom needs one of the places of `Limits.requests`, until his answer has
    been taken."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        self._app = request_response(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        tenant_of(request)
        with serving_of(request).live.place():
            await self._app(scope, receive, send)


class Whole(JSONResponse):
    """An answer in one piece, which is sent when the client has taken it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # it waits for the body to be gone


class Events(StreamingResponse):
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
