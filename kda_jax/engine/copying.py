"""Pages of the pool on their way to host memory: some pieces a step, and a bound on what they hold of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from kda_jax.engine.memory import Memory
from kda_jax.engine.programs import Programs

PIECES = 4
"""Pieces that a step copies at most: of `Programs.moved_pages` pages each."""
HELD = 8
"""Pieces that lie on the device at once, beside the pool; the next is made when one has come to the host."""


@dataclass(slots=True, eq=False)
class Copy:
    """Pages to copy.

    Attributes:
        numbers: of the pool, in order.
        left: called on the engine's thread when the pool may change again.
        arrived: called on the copying thread with the pages, [n, planes, R, L] in the pool's dtype.
        failed: called on the engine's thread if they do not come; once, and not with `arrived`.
        read: how many were read on the device.
        pages: of these, the first `filled` are on the host.
        over: whether it was given up.
    """

    numbers: tuple[int, ...]
    left: Callable[[], None]
    arrived: Callable[[np.ndarray], None]
    failed: Callable[[], None]
    read: int = 0
    pages: np.ndarray | None = None
    filled: int = 0
    over: bool = False


class Copying:
    """Copies in the order they come in. All but what says so is called on the engine's thread."""

    def __init__(self, programs: Programs, post: Callable[[Callable[[], None]], None]) -> None:
        """
        Args:
            programs: that read pages.
            post: has a call done on the engine's thread.
        """
        self._programs, self._post = programs, post
        self._queue: deque[Copy] = deque()
        self._held = 0
        self._thread = ThreadPoolExecutor(1, "kda-jax copy")

    @property
    def count(self) -> int:
        """Copies that still need the pool as it is."""
        return len(self._queue)

    @property
    def pages(self) -> int:
        """Pages of these that are still to read."""
        return sum(len(copy.numbers) - copy.read for copy in self._queue)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that pieces hold beside the pool."""
        return self._held * self._piece_nbytes

    @property
    def most_nbytes(self) -> int:
        """The most that these may be."""
        return HELD * self._piece_nbytes

    def add(self, copy: Copy) -> None:
        """One more, behind the others."""
        self._queue.append(copy)

    def step(self, memory: Memory) -> bool:
        """Has some pieces copied, without waiting for them. Whether anything that waited went on."""
        left, size, moved = min(PIECES, HELD - self._held), self._programs.moved_pages, False
        while self._queue and left > 0:
            first, moved = self._queue[0], True
            at = first.read
            try:
                pieces = self._programs.read_pages(memory, first.numbers[at : at + left * size])
            except Exception:  # as when the device has no room for the pieces
                self._give_up(first)
                continue
            first.read = min(at + left * size, len(first.numbers))
            left -= len(pieces)
            self._held += len(pieces)
            self._thread.submit(self._fetch, first, pieces)
            if first.read == len(first.numbers):
                self._queue.popleft()
                first.left()
        return moved

    def abandon(self) -> None:
        """The memory is lost, and with it what was not read."""
        for copy in list(self._queue):
            self._give_up(copy)

    def close(self) -> None:
        """Waits for the pieces that are fetched, and gives up the others; on any thread, after the engine's has
        ended."""
        self._thread.shutdown(cancel_futures=True)

    @property
    def _piece_nbytes(self) -> int:
        return self._programs.moved_pages * self._programs.layout.page_nbytes

    def _give_up(self, copy: Copy) -> None:
        if copy.over:
            return
        copy.over = True
        if copy in self._queue:
            self._queue.remove(copy)
            copy.left()
        copy.failed()

    def _fetched(self, count: int) -> None:
        self._held -= count

    # On a thread of its own

    def _fetch(self, copy: Copy, pieces: list[jax.Array]) -> None:
        """Pieces to the host; who is told that they are fetched finds their memory free."""
        count = len(pieces)
        try:
            self._fill(copy, pieces)
        except Exception:
            self._post(partial(self._give_up, copy))
        pieces.clear()
        self._post(partial(self._fetched, count))
        if copy.filled == len(copy.numbers) and copy.pages is not None:
            pages, copy.pages = copy.pages, None
            copy.arrived(pages)

    def _fill(self, copy: Copy, pieces: list[jax.Array]) -> None:
        layout = self._programs.layout
        if copy.pages is None:
            shape = len(copy.numbers), layout.num_planes, layout.page_rows, layout.config.latent_size
            copy.pages = np.empty(shape, layout.dtype)
        for piece in pieces:
            rest = copy.pages[copy.filled : copy.filled + len(piece)]
            rest[:] = np.asarray(piece)[: len(rest)]
            copy.filled += len(rest)
