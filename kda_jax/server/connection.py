"""What a client sends, within limits, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kda_jax.server.bodies import Room
from kda_jax.server.errors import ApiError, bad_field
from kda_jax.server.limits import Limits
from kda_jax.server.serving import Serving

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
_SPARE = 16
"""Of a body that is too large, this many times the limit is read and thrown away: most clients look for an answer
only when they have sent everything."""


@asynccontextmanager
async def read(request: Request, kind: type[Body], serving: Serving) -> AsyncIterator[Body]:
    """The body of a request as one of the types of `requests`. It counts among the bodies that are being read until the
    block is left, which is for making tokens of it.

    Raises:
        ApiError: 400 for what is not of that type, 408 for a body that comes too slowly, 413 for one too large, 415 for
            one that is encoded, 429 if there is no room for it beside others.
    """
    limits = serving.limits
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding: bodies are taken as they are, got {encoding!r}")
    announced = _announced(request)
    if announced > _SPARE * limits.body_nbytes:
        raise _too_large(limits)
    with serving.bodies.room(announced if announced <= limits.body_nbytes else 0) as room:
        try:
            async with asyncio.timeout(limits.body_s):
                body = await _whole(request, limits, room)
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_s:g} s"
            raise ApiError(408, message, code="timeout", close=True) from None
        try:
            asked = kind.model_validate_json(body)
        except ValidationError as error:
            raise bad_field(error) from None
        del body
        yield asked


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Does some work for a client; ends it and returns None when the client hangs up.

    The body must have been read.
    """
    working, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def _announced(request: Request) -> int:
    """Bytes that a request says its body has; 0 if it does not say."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


async def _whole(request: Request, limits: Limits, room: Room) -> bytes:
    parts, nbytes, most = [], 0, limits.body_nbytes
    async for part in request.stream():
        nbytes += len(part)
        if nbytes <= most:
            room.grow(nbytes)
            parts.append(part)
        elif nbytes > _SPARE * most:
            break
        else:
            parts.clear()
    if nbytes > most:
        raise _too_large(limits)
    return b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    message = f"the body is larger than {limits.body_nbytes} bytes"
    return ApiError(413, message, code="too_large", close=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
