"""Prompts that need not be read, as the engine has just refused no longer ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from kda_jax.server.errors import ApiError
from kda_jax.server.live import too_many
from kda_jax.server.requests import Message


class Door:
    """Remembers the length of what was refused, until something has got out of the others' way or some time has gone.

    Whoever is as long is told to come again before any work is done for him.
    """

    def __init__(self, retry_s: int) -> None:
        """`retry_s`: seconds after which whoever was refused comes again."""
        self._retry_s = retry_s
        self._refused: dict[str, tuple[int, float]] = {}  # by kind of prompt: the least length, and when

    @contextmanager
    def passing(self, kind: str, length: int) -> Iterator[None]:
        """What is done for a prompt, between its arrival and the engine's answer.

        Args:
            kind: lengths of one kind compare.
            length: of the prompt, as far as it is known without work.

        Raises:
            ApiError: 429 if it would be refused.
        """
        refused, when = self._refused.get(kind, (0, 0.0))
        if refused and length >= refused and time.monotonic() < when + self._retry_s:
            raise too_many("too many tokens wait already", self._retry_s)
        try:
            yield
        except ApiError as error:
            if error.status == HTTPStatus.TOO_MANY_REQUESTS and length:
                self._refused[kind] = length, time.monotonic()
            raise

    def opened(self) -> None:
        """Something waits no more, or has ended: there may be room."""
        self._refused.clear()


def length_of(prompts: Sequence[str | list[int]]) -> tuple[str, int]:
    """Kind and length of the prompt of a completion; of several none, as only a part may have been too much."""
    if len(prompts) != 1:
        return "several", 0
    return "text" if isinstance(prompts[0], str) else "tokens", len(prompts[0])


def length_of_messages(messages: Sequence[Message]) -> tuple[str, int]:
    """The same of a chat."""
    return "messages", sum(len(message.content or "") for message in messages)
