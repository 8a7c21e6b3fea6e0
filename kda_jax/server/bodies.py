"""Memory for the bodies of requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kda_jax.server.live import too_many


class Bodies:
    """Bytes of the bodies that are being read, of all requests together.

    Attributes:
        nbytes: that are spoken for.
    """

    def __init__(self, most: int, retry_s: int) -> None:
        """`most` bytes at once; who finds no room comes again after `retry_s`."""
        self.nbytes, self._most, self._retry_s = 0, most, retry_s

    @contextmanager
    def room(self, nbytes: int) -> Iterator[Room]:
        """Room for a body, of so many bytes to begin with, until the block is left.

        Raises:
            ApiError: 429 if there is none.
        """
        room = Room(self)
        try:
            room.grow(nbytes)
            yield room
        finally:
            self.nbytes -= room.nbytes

    def take(self, nbytes: int) -> None:
        """Speaks for so many bytes.

        Raises:
            ApiError: 429 if others have them.
        """
        if self.nbytes + nbytes > self._most:
            raise too_many(f"bodies of {self.nbytes} bytes are being read", self._retry_s)
        self.nbytes += nbytes


class Room:
    """What one body has of it.

    Attributes:
        nbytes: so many bytes.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.nbytes, self._bodies = 0, bodies

    def grow(self, nbytes: int) -> None:
        """Makes it at least so large.

        Raises:
            ApiError: 429 if there is no room for that.
        """
        more = max(0, nbytes - self.nbytes)
        self._bodies.take(more)
        self.nbytes += more
