"""What a server has: the engine, the model's tokenizer and sizes, its limits, keys and books."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from kda_jax.engine import Closed, Overloaded, Refused, Stream
from kda_jax.sampling import make_sampler
from kda_jax.server.backend import Backend
from kda_jax.server.bodies import Bodies
from kda_jax.server.door import Door
from kda_jax.server.errors import ApiError
from kda_jax.server.history import History
from kda_jax.server.keys import Keys, Tenant
from kda_jax.server.limits import Limits
from kda_jax.server.live import Live, too_many
from kda_jax.server.metrics import Metrics
from kda_jax.server.requests import Asked
from kda_jax.tokenizer import Tokenizer

T = TypeVar("T")
_AT_ONCE = 2
_CLOSING = {"draining": "the server is shutting down", "closed": "the engine has failed, or was stopped"}


class Serving:
    """One model on one engine.

    Attributes:
        engine: behind it.
        tokenizer: of the model.
        name: as requests call the model.
        vocab_size: token ids are below it.
        context: most tokens of a prompt and its continuation.
        fingerprint: changes when the weights do.
        limits, keys: what it takes, and from whom.
        draining: whether it takes no more requests.
        live, bodies, door, history, metrics: what happens.
        begun: seconds since 1970 when it was made.
    """

    def __init__(
        self,
        engine: Backend,
        tokenizer: Tokenizer,
        *,
        name: str,
        vocab_size: int,
        context: int,
        fingerprint: str = "",
        limits: Limits | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.vocab_size, self.context, self.fingerprint = vocab_size, context, fingerprint
        self.limits, self.keys = limits or Limits(), keys or Keys()
        self.draining = False
        self.live = Live(self.limits.requests, self.limits.retry_s)
        self.bodies = Bodies(self.limits.bodies_nbytes, self.limits.retry_s)
        self.door = Door(self.limits.retry_s)
        self.history = History()
        self.metrics = Metrics(engine, self.live)
        self.begun = int(time.time())
        self._preparing, self._told = CapacityLimiter(_AT_ONCE), False

    def check_open(self) -> None:
        """Raises:
        ApiError: 503 while draining, and when the engine has failed.
        """
        if self.draining or self.engine.closed:
            raise self.closing()

    def check_model(self, name: str) -> None:
        """Raises:
        ApiError: 404 for a model that is not the one that is served.
        """
        if name != self.name:
            message = f"no model {name!r} here; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def closing(self) -> ApiError:
        """What a request is told that the server does not take or finish any more. What the engine says of its end is
        for the log."""
        code = "draining" if self.draining else "closed"
        if not self.draining and self.engine.closed and not self._told:
            self._told = True
            logging.getLogger(__name__).error("no request is taken any more: %s", self.engine.closed)
        return ApiError(503, _CLOSING[code], code=code, retry_s=self.limits.retry_s)

    async def prepare(self, work: Callable[..., T], *given: Any) -> T:
        """Makes tokens of a prompt, beside the event loop. A few at once: more would take turns, and the loop's."""
        return await to_thread.run_sync(partial(work, *given), limiter=self._preparing)

    def submit(self, tokens: np.ndarray, asked: Asked, tenant: Tenant, seed: int, room: int) -> Stream:
        """Hands one continuation to the engine.

        Args:
            tokens: the prompt, int32 [T].
            asked: how to go on.
            tenant: who asks.
            seed: of the random numbers.
            room: most tokens to generate.

        Raises:
            ApiError: 400 for what does not fit, 429 if too much waits, 503 if the engine is closed.
        """
        given: dict[str, Any] = {"temperature": 1.0 if asked.temperature is None else asked.temperature}
        given |= {"top_k": asked.top_k, "top_p": asked.top_p, "min_p": asked.min_p}
        top = asked.top_logprobs_asked
        try:
            return self.engine.submit(
                tokens,
                max_new_tokens=room,
                sampler=make_sampler(**given),
                seed=seed & 0xFFFFFFFF,
                timeout=self.limits.request_s,
                tenant=tenant.salt,
                logprobs=0 if top is None else max(1, top),
            )
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, Refused) else None
            raise ApiError(400, str(error), code=code) from None
        except Overloaded:
            raise too_many("too many tokens wait already", self.limits.retry_s) from None
        except Closed:
            raise self.closing() from None

    def name_of(self, prefix: str) -> str:
        """A new name for a response."""
        return f"{prefix}-{secrets.token_hex(12)}"


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
