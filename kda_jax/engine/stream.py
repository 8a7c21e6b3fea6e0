"""What a request gives back: its tokens as they come, and how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

from kda_jax.engine.request import Outcome

Reason = Literal["stop", "length", "cancelled", "expired", "failed"]


class Token(NamedTuple):
    """A token that was generated.

    Attributes:
        token: its id.
        logprob: its natural logarithm of probability, before temperature and limits; None where none were asked for.
        top: the likeliest tokens and theirs, likeliest first, as many as were asked for.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Usage(NamedTuple):
    """What a request took.

    Attributes:
        prompt_tokens: length of the prompt.
        completion_tokens: tokens generated, a stop token among them.
        cached: prompt tokens that were restored and not computed, by the name of the tier that their latents came from.
        drafted, accepted: tokens that were guessed, and those of them that were right.
    """

    prompt_tokens: int
    completion_tokens: int
    cached: Mapping[str, int]
    drafted: int = 0
    accepted: int = 0


class Times(NamedTuple):
    """Seconds since the request was submitted; None for what did not happen."""

    queued_s: float | None
    first_token_s: float | None
    total_s: float


class Finished(NamedTuple):
    """How a request ended.

    Attributes:
        outcome: as the scheduler has it.
        reason: the same in more detail: `stop` for a stop token, `length` for `max_new_tokens`.
        tokens: generated, without the stop token.
        usage: what it took.
        error: what went wrong, if it failed.
        times: how long it took.
    """

    outcome: Outcome
    reason: Reason
    tokens: tuple[int, ...]
    usage: Usage
    error: str | None
    times: Times


class Stream:
    """One request, from any thread. Iterated over, also by asyncio, it gives tokens until the request has ended; who
    iterates again gets them again."""

    def __init__(self, id: int, cancel: Callable[[int], None]) -> None:
        """
        Args:
            id: of the request.
            cancel: asks the engine to end it.
        """
        self.id, self._cancel = id, cancel
        self._news, self._ended = threading.Condition(), threading.Event()
        self._tokens: list[Token] = []
        self._finished: Finished | None = None
        self._watchers: list[Callable[[], object]] = []

    def __iter__(self) -> Iterator[Token]:
        at = 0
        while True:
            with self._news:
                while at == len(self._tokens) and self._finished is None:
                    self._news.wait()
                new, ended = self._tokens[at:], self._finished is not None
            yield from new
            at += len(new)
            if ended:
                return

    async def __aiter__(self) -> AsyncIterator[Token]:
        loop, woken, at = asyncio.get_running_loop(), asyncio.Event(), 0
        with self._watched(lambda: loop.call_soon_threadsafe(woken.set)):
            while True:
                woken.clear()
                with self._news:
                    new, ended = self._tokens[at:], self._finished is not None
                for token in new:
                    yield token
                at += len(new)
                if ended:
                    return
                await woken.wait()

    def cancel(self) -> bool:
        """Ends the request soon, if it has not ended. Whether it had not when this was called."""
        with self._news:
            if self._finished is not None:
                return False
        self._cancel(self.id)
        return True

    def result(self, timeout: float | None = None) -> Finished:
        """Waits until the request has ended.

        Args:
            timeout: seconds; None for as long as it takes.

        Raises:
            TimeoutError: if it has not ended by then. It goes on.
        """
        if not self._ended.wait(timeout):  # not woken by every token
            raise TimeoutError(f"request {self.id} has not ended after {timeout} s")
        assert self._finished is not None
        return self._finished

    def put(self, token: Token) -> None:
        """The engine's: one more token."""
        with self._news:
            self._tokens.append(token)
            self._tell()

    def end(self, finished: Finished) -> None:
        """The engine's: the request has ended. Only the first end counts."""
        with self._news:
            if self._finished is None:
                self._finished = finished
                self._ended.set()
                self._tell()

    def tokens(self) -> tuple[int, ...]:
        """Ids of the tokens so far."""
        with self._news:
            return tuple(token.token for token in self._tokens)

    def _tell(self) -> None:
        self._news.notify_all()
        for watcher in list(self._watchers):
            try:
                watcher()
            except RuntimeError:  # its event loop was closed, and nobody waits there
                self._watchers.remove(watcher)

    @contextmanager
    def _watched(self, watcher: Callable[[], object]) -> Iterator[None]:
        with self._news:
            self._watchers.append(watcher)
        try:
            yield
        finally:
            with self._news:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)
