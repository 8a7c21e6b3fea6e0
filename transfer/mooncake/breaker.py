"""Stops calling a store that does not answer, and tries it again after a pause."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from transfer.counters import Recorder


class Breaker:
    """Opens after some failures in a row; after a pause lets one call through, whose end decides. From any thread."""

    def __init__(
        self, failures: int, pause_s: float, recorder: Recorder, clock: Callable[[], float] = monotonic
    ) -> None:
        self._limit, self._pause_s, self._recorder, self._clock = failures, pause_s, recorder, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened: float | None = None
        self._trying = False

    def enter(self) -> bool:
        """Whether a call may be made now. If so, `leave` must follow."""
        with self._lock:
            if self._opened is None:
                return True
            if self._trying or self._clock() < self._opened + self._pause_s:
                return False
            self._trying = True
            self._recorder.breaker("half-open")
            return True

    def leave(self, well: bool) -> None:
        """How a call that was let through ended."""
        with self._lock:
            self._trying = False
            if well:
                self._failures = 0
                if self._opened is not None:
                    self._opened = None
                    self._recorder.breaker("closed")
                return
            self._failures += 1
            if self._opened is not None or self._failures >= self._limit:
                self._opened = self._clock()
                self._recorder.breaker("open")
