"""HTTP with deadlines: who does not take what it is sent, or does not ask for anything, is hung up on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kda_jax.server.limits import Limits

SENT_NBYTES = 32 << 10
"""Bytes that the kernel is asked to keep for a client that does not read; the server itself keeps one event. The kernel
takes more when a good part of it is free: a client that takes less than that in the time is as one that takes nothing.
"""


class Protocol(H11Protocol):
    """Uvicorn's, for one connection.

    Whoever sends waits until all of it is the kernel's. A client that takes nothing for `Limits.unread_s` is cut off,
    which for the application is one that hung up.
    """

    def __init__(self, limits: Limits, **given: Any) -> None:
        """`given`: what uvicorn gives."""
        super().__init__(**given)
        self._limits = limits
        self._timers: dict[str, Any] = {}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        peer = transport.get_extra_info("socket")
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_NBYTES)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in ("unread", "unasked"):
            self._stop(name)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop("unread")
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._wait_for_request()
        super().on_response_complete()

    def _watch(self, left: int) -> None:
        self._start("unread", self._limits.unread_s, self._look, left)

    def _look(self, was: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= was:
            self.transport.abort()
        else:
            self._watch(left)

    def _wait_for_request(self) -> None:
        """The head of the next request has as long as a body has; so has the rest of a body that nobody reads."""
        self._start("unasked", self._limits.body_s, self._end_if_unasked)

    def _end_if_unasked(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _start(self, name: str, seconds: float, call: Callable[..., None], *given: int) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, call, *given)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
