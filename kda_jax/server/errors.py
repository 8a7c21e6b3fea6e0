"""Errors as OpenAI's clients know them: a status, and a json body that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

_SHOWN = 60  # characters of a wrong value that a message repeats


class ApiError(Exception):
    """Ends a request with an error.

    Args:
        status: of HTTP.
        message: what was wrong, what was received, what to do.
        param: the field of the request.
        code: a word for programs.
        retry_s: seconds to wait before another try.
        close: whether the connection is of no more use.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_s, self.close = retry_s, close

    def body(self) -> dict[str, Any]:
        """The json of a response, or of an event in a stream that has begun."""
        kind = {429: "rate_limit_error", 401: "authentication_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response in place of what was asked for."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


def bad_field(error: ValidationError) -> ApiError:
    """What pydantic found wrong first, as one line that begins with the field's name."""
    first = error.errors(include_url=False)[0]
    param = path(first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no json: {message}")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not known here; leave it out", param=param, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param)
    return ApiError(
        400, f"{param or 'the body'}: {message}, got {_short(first['input'])}", param=param or None
    )


def path(loc: Sequence[str | int]) -> str:
    """A place in a json value as one writes it: `messages[0].role`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")


def _short(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "an object" if isinstance(value, Mapping) else f"a list of {len(value)}"
    text = repr(value) if not isinstance(value, str) else repr(value[:_SHOWN])
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
