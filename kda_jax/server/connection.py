"""What a client sends, within limits, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kda_jax.server.errors import ApiError, bad_field
from kda_jax.server.limits import Limits

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
_SPARE = 16
"""Of a body that is too large, this many times the limit is read and thrown away: most clients look for an answer
only when they have sent everything."""


async def read(request: Request, kind: type[Body], limits: Limits) -> Body:
    """The body of a request as one of the types of `requests`.

    Raises:
        ApiError: 400 for what is not of that type, 408 for a body that comes too slowly, 413 for one too large.
    """
    try:
        async with asyncio.timeout(limits.body_s):
            body = await _whole(request, limits.body_nbytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_s:g} s", code="timeout") from None
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_field(error) from None


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


async def _whole(request: Request, most: int) -> bytes:
    parts, nbytes = [], 0
    async for part in request.stream():
        nbytes += len(part)
        if nbytes <= most:
            parts.append(part)
        elif nbytes > _SPARE * most:
            break
    if nbytes > most:
        raise ApiError(413, f"the body is larger than {most} bytes", code="too_large")
    return b"".join(parts)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
