"""Requests that are being served."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kda_jax.server.errors import ApiError
from kda_jax.server.keys import Tenant


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way.

    Attributes:
        name: as the response calls it.
        tenant: whose it is.
        prompt_tokens: of all its prompts.
        begun: seconds on `time.monotonic`, when it had been read.
        choices: continuations that it asked for.
        generated: tokens so far, of all continuations.
        first: seconds from `begun` to the first token; None before it.
    """

    name: str
    tenant: Tenant
    prompt_tokens: int
    choices: int
    begun: float = field(default_factory=time.monotonic)
    generated: int = 0
    first: float | None = None

    def row(self) -> dict[str, Any]:
        """It as the page shows it; of its text nothing."""
        return {
            "id": self.name,
            "tenant": self.tenant.name,
            "prompt_tokens": self.prompt_tokens,
            "choices": self.choices,
            "generated": self.generated,
            "seconds": round(time.monotonic() - self.begun, 3),
            "first_token_s": None if self.first is None else round(self.first, 3),
        }


class Live:
    """The requests of a server."""

    def __init__(self, most: int, retry_s: int) -> None:
        """`most` of them at once; the others come again after `retry_s`."""
        self._most, self._retry_s = most, retry_s
        self._places, self._requests = 0, dict[str, Request]()

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for a request: while its body comes, while it is served and while its answer is taken.

        Raises:
            ApiError: 429 if there is none.
        """
        if self._places >= self._most:
            raise too_many(f"{self._most} requests are being served", self._retry_s)
        self._places += 1
        try:
            yield
        finally:
            self._places -= 1

    def begin(self, request: Request) -> None:
        """Shows a request, whose prompt has been read, among the live ones."""
        self._requests[request.name] = request

    def end(self, request: Request) -> None:
        """Shows it no more; more than once is no more than once."""
        self._requests.pop(request.name, None)

    def rows(self, tenant: Tenant) -> list[dict[str, Any]]:
        """Those that a tenant may see, oldest first."""
        return [each.row() for each in self._requests.values() if tenant.operator or each.tenant == tenant]


def too_many(why: str, retry_s: int) -> ApiError:
    """What a request is told that is not taken because there are others."""
    return ApiError(429, f"{why}; try again later", code="overloaded", retry_s=retry_s)
