"""Calls that nobody waits for: a checkpoint is stored while the next token is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from transfer.errors import Closed

T = TypeVar("T")


class Background:
    """Does calls one after the other on a thread of its own. `submit` never waits: a call that finds no place is
    dropped. What a call was given is held until it has ended, so the places bound the memory that waits.
    """

    def __init__(self, places: int = 8) -> None:
        """`places` is how many calls there are at most, waiting or running.

        Raises:
            ValueError: there is no place.
        """
        if places < 1:
            raise ValueError(f"{places=} must be at least 1")
        self._free = threading.Semaphore(places)
        self._executor = ThreadPoolExecutor(1, "transfer-background")
        self._lock = threading.Lock()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many calls found no place, or were still waiting when this was closed."""
        return self._dropped

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T] | None:
        """Does `call(*arguments)` later, as `submit(objects.put, items, 30.0)`; None if it is dropped.

        Raises:
            Closed: after `close`.
        """
        if not self._free.acquire(blocking=False):
            self._drop()
            return None
        try:
            future = self._executor.submit(call, *arguments)
        except RuntimeError as error:
            self._free.release()
            raise Closed("Background was used after it was closed") from error
        future.add_done_callback(self._ended)
        return future

    def close(self) -> None:
        """Waits for the call that runs, and cancels those that wait. A second close does nothing."""
        self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self, future: Future) -> None:
        self._free.release()
        if future.cancelled():
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            self._dropped += 1
