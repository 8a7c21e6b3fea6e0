"""Serving until told to stop, and then to the end of what was begun."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from kda_jax.server.app import application
from kda_jax.server.serving import Serving

_CLOSE_S = 5  # for connections to be closed, once the engine has ended its requests


def run(serving: Serving, host: str, port: int, listening: Callable[[str], None] = print) -> bool:
    """Serves until SIGTERM or SIGINT. Then nothing new is taken, and what runs has `Limits.drain_s` to finish; a second
    signal does not wait for that.

    Args:
        serving: what to serve.
        host, port: where to listen; port 0 takes a free one.
        listening: is told the address once connections are taken.

    Returns:
        Whether all requests finished.

    Raises:
        OSError: if one cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    with listener:
        server = Server(serving)
        bound = listener.getsockname()[1]
        listening(f"http://{f'[{host}]' if ':' in host else host}:{bound}")
        server.run(sockets=[listener])
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
                http="h11",
                ws="none",
                lifespan="off",
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
        self._serving.draining = True
        self._draining = threading.Thread(target=self._drain, name="kda-jax drain", daemon=True)
        self._draining.start()

    def _drain(self) -> None:
        try:
            self.all_finished = self._serving.engine.drain(self._serving.limits.drain_s)
        finally:
            self.should_exit = True
