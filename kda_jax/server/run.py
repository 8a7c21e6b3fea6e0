"""Serving until told to stop, and then to the end of what was begun."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn

from kda_jax.server.app import application
from kda_jax.server.protocol import Protocol
from kda_jax.server.serving import Serving

_BACKLOG = 2048
_CLOSE_S = 5  # for connections to be closed, once the engine has ended its requests


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which takes no connection before `run`; port 0 takes a free one.

    Raises:
        OSError: if one cannot listen there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


def run(serving: Serving, bound: socket.socket, listening: Callable[[str], None] = print) -> bool:
    """Serves until SIGTERM or SIGINT. Then nothing new is taken, and what runs has `Limits.drain_s` to finish; a second
    signal does not wait for that.

    Args:
        serving: what to serve.
        bound: where to listen; it is closed at the end.
        listening: is told the address when connections are about to be taken.

    Returns:
        Whether all requests finished.
    """
    with bound:
        server = Server(serving)
        host, port = bound.getsockname()[:2]
        bound.listen(_BACKLOG)
        listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        server.run(sockets=[bound])
    return server.all_finished


class Server(uvicorn.Server):
    """Uvicorn, which drains before it stops.

    Attributes:
        all_finished: whether every request had finished when it stopped.
    """

    def __init__(self, serving: Serving) -> None:
        super().__init__(
            uvicorn.Config(
                application(serving),
                http=partial(Protocol, serving.limits),  # pyright: ignore[reportArgumentType]
                ws="none",
                lifespan="off",
                log_config=None,  # whoever runs it has said where logs go
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )
        self._serving, self.all_finished = serving, True
        self._draining: threading.Thread | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal: drain, then stop; on the second: stop."""
        if self._draining is not None:
            self.should_exit = True
            return
        self._serving.draining, self.all_finished = True, False
        self._draining = threading.Thread(target=self._drain, name="kda-jax drain", daemon=True)
        self._draining.start()

    def _drain(self) -> None:
        try:
            self.all_finished = self._serving.engine.drain(self._serving.limits.drain_s)
        finally:
            self.should_exit = True
