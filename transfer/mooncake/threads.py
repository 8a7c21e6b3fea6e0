"""Calls that may hang, on threads that may be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic

from transfer.errors import Closed


@dataclass(slots=True)
class _Job:
    work: Callable[[], None]
    until: float
    ended: threading.Event = field(default_factory=threading.Event)


class Threads:
    """Some worker threads. A caller waits for its job until a deadline and no longer; the job runs to its own end,
    and what it holds stays held so long.

    Attributes:
        closing: set by `close`, for work that waits.
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self._alive = count
        self._last: Callable[[], None] = lambda: None
        self._all_ended = threading.Event()
        for i in range(count):
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True).start()

    def check(self) -> None:
        """Raises Closed after `close`."""
        if self.closing.is_set():
            raise Closed(f"{self._name} was used after it was closed")

    def run(self, work: Callable[[], None], until: float) -> bool:
        """Whether the work ended by `until`, of `monotonic`. It is not begun later, nor after `close`.

        Raises:
            Closed: after `close`.
        """
        job = _Job(work, until)
        with self._lock:
            self.check()
            self._jobs.put(job)
        return job.ended.wait(max(0.0, until - monotonic()))

    def close(self, seconds: float, last: Callable[[], None]) -> bool:
        """Begins no more work. Once all that runs has ended `last` runs, once. Waits for it so many seconds; whether
        it has ended.
        """
        with self._lock:
            if not self.closing.is_set():
                self._last = last
                self.closing.set()
                for _ in range(self._alive):
                    self._jobs.put(None)
        return self._all_ended.wait(seconds)

    def _work(self) -> None:
        while job := self._jobs.get():
            try:
                if not self.closing.is_set() and monotonic() < job.until:
                    job.work()
            finally:
                job.ended.set()
            del job  # and with it what it holds, before the next one is waited for
        with self._lock:
            self._alive -= 1
            if self._alive:
                return
        try:
            self._last()
        finally:
            self._all_ended.set()
