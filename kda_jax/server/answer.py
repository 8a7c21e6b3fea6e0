"""A request for text on its way: what was asked, its continuations, and the answer whole or in chunks."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from kda_jax.engine import Token
from kda_jax.server.choice import Choice, Piece, interleaved
from kda_jax.server.errors import ApiError
from kda_jax.server.forms import Form
from kda_jax.server.keys import Tenant
from kda_jax.server.live import Request
from kda_jax.server.requests import Asked
from kda_jax.server.serving import Serving

_SEEDS = 1 << 32


class Answer:
    """Everything from the engine's requests to the json.

    Args:
        serving: where.
        tenant: who asks.
        asked: what.
        prompts: token ids of each, int32 [T]; choice `p * n + i` is the i-th continuation of the p-th.
        rooms: most tokens to generate behind each.
        form: of the json.

    Raises:
        ApiError: what `Serving.submit` raises. Nothing is left behind then.
    """

    def __init__(
        self,
        serving: Serving,
        tenant: Tenant,
        asked: Asked,
        prompts: Sequence[np.ndarray],
        rooms: Sequence[int],
        form: Form,
    ) -> None:
        self._serving, self._tenant, self._asked, self._form = serving, tenant, asked, form
        self._n, self._created = asked.n or 1, int(time.time())
        self._prompts = [prompt for prompt in prompts for _ in range(self._n)]
        self._live = Request(
            serving.name_of(form.prefix), tenant, sum(map(len, prompts)), self._n * len(prompts)
        )
        self._choices: list[Choice] = []
        self._last: dict[int, float] = {}  # when the last token of a choice came
        serving.live.begin(self._live)
        try:
            self._submit(rooms)
        except BaseException:
            self.close()
            raise

    @property
    def streams(self) -> bool:
        """Whether it was asked for in chunks."""
        return bool(self._asked.stream)

    def close(self) -> None:
        """Ends what is not finished; more than once is no more than once."""
        for choice in self._choices:
            choice.stream.cancel()
        self._serving.live.end(self._live)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ApiError: if a continuation failed, came too late, or was ended with the server.
        """
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        async with aclosing(self._pieces()) as news:
            async for index, piece in news:
                if piece is not None:
                    pieces[index].append(piece)
        choices = []
        for index, choice in enumerate(self._choices):
            tokens = [token for piece in pieces[index] for token in piece.tokens]
            text = "".join(piece.text for piece in pieces[index])
            choices.append(self._form.choice(index, text, self._logprobs(tokens, 0), choice.finish_reason))
        return self._envelope(self._form.whole) | {"choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as events of a stream: chunks, the usage if it was asked for, and the end; or an error."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield f"data: {json.dumps(chunk)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        else:
            yield "data: [DONE]\n\n"

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        options = self._asked.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = self._envelope(self._form.chunk) | ({"usage": None} if with_usage else {})
        for index in range(len(self._choices)):
            opening = self._form.opening(index)
            if opening is not None:
                yield head | {"choices": [opening]}
        starts = [0] * len(self._choices)
        async with aclosing(self._pieces()) as news:
            async for index, piece in news:
                if piece is None:
                    reason = self._choices[index].finish_reason
                    yield head | {"choices": [self._form.delta(index, "", None, reason)]}
                elif piece.text or piece.tokens:
                    logprobs = self._logprobs(piece.tokens, starts[index])
                    yield head | {"choices": [self._form.delta(index, piece.text, logprobs, None)]}
                    starts[index] += len(piece.text)
        if with_usage:
            yield head | {"choices": [], "usage": self._usage()}

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece | None], None]:
        """The pieces of all choices, with the books kept."""
        async with aclosing(interleaved(self._choices)) as news:
            async for index, piece in news:
                if piece is None:
                    self._ended(self._choices[index])
                elif piece.token:
                    self._time(index)
                yield index, piece

    def _submit(self, rooms: Sequence[int]) -> None:
        seed = secrets.randbelow(_SEEDS) if self._asked.seed is None else self._asked.seed
        logprobs = self._asked.top_logprobs_asked is not None
        for index, prompt in enumerate(self._prompts):
            room = rooms[index // self._n]
            stream = self._serving.submit(prompt, self._asked, self._tenant, seed + index % self._n, room)
            self._choices.append(Choice(stream, self._serving.tokenizer, self._asked.stop, logprobs))

    def _ended(self, choice: Choice) -> None:
        finished, reason = choice.finished, choice.finish_reason
        assert finished is not None
        if reason == "cancelled":
            raise self._serving.closing()
        if reason == "expired":
            raise ApiError(504, f"not finished after {self._serving.limits.request_s} s", code="timeout")
        if reason == "failed":
            logging.getLogger(__name__).error("%s failed: %s", self._live.name, finished.error)
            message = f"the engine failed at this request; the server's log says more of {self._live.name}"
            raise ApiError(500, message, code="engine_failed")
        self._serving.door.opened()
        usage = finished.usage
        self._serving.history.add(self._tenant, usage.prompt_tokens, usage.cached, choice.completion_tokens)

    def _time(self, index: int) -> None:
        now, metrics = time.monotonic(), self._serving.metrics
        if index in self._last:
            metrics.per_token.observe(now - self._last[index])
        else:
            metrics.first_token.observe(now - self._live.begun)
            self._live.first = self._live.first or now - self._live.begun
            self._serving.door.opened()
        self._live.generated += 1
        self._last[index] = now

    def _usage(self) -> dict[str, Any]:
        """Prompts count once, however many continuations they have."""
        firsts = [choice.finished for choice in self._choices[:: self._n] if choice.finished]
        by_tier = sum((Counter(first.usage.cached) for first in firsts), Counter())
        completion = sum(choice.completion_tokens for choice in self._choices)
        prompt = self._live.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": by_tier.total(),
                "cached_tokens_by_tier": dict(by_tier),
            },
        }

    def _logprobs(self, tokens: Sequence[Token], start: int) -> dict[str, Any] | None:
        return None if self._asked.top_logprobs_asked is None else self._form.logprobs(tokens, start)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._live.name,
            "object": kind,
            "created": self._created,
            "model": self._serving.name,
            "system_fingerprint": self._serving.fingerprint,
        }
