"""What a store has done, as plain numbers that any exporter can read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic


@dataclass(frozen=True, slots=True)
class Operation:
    """Of one operation (`put`, `get`, `contains`, `remove`) with one outcome (`stored`, `hit`, `miss`, `late`, ...).

    Attributes:
        objects: how many objects ended so.
        nbytes: bytes of these that were moved.
        seconds: time of the calls they were part of, a call's time shared equally among its objects.
        slowest: the longest of these calls, seconds.
    """

    objects: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    slowest: float = 0.0


@dataclass(frozen=True, slots=True)
class Counters:
    """A snapshot.

    Attributes:
        operations: by (operation, outcome).
        retries: tries after the first, of any operation.
        dropped: objects that were given up after all tries.
        copied: bytes copied between the caller's memory and the store's own on this side.
        breaker: `closed` (calls go through), `open` (refused at once) or `half-open` (one call tries).
        opened: how often the breaker opened.
    """

    operations: dict[tuple[str, str], Operation] = field(default_factory=dict)
    retries: int = 0
    dropped: int = 0
    copied: int = 0
    breaker: str = "closed"
    opened: int = 0


class Recorder:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Counters()

    @contextmanager
    def call(self, operation: str) -> Iterator[list[tuple[str, int]]]:
        """Times a call; its body appends (outcome, bytes) for each object."""
        ended: list[tuple[str, int]] = []
        start = monotonic()
        try:
            yield ended
        finally:
            took = monotonic() - start
            with self._lock:
                operations = dict(self._now.operations)
                for outcome, nbytes in ended:
                    old = operations.get((operation, outcome), Operation())
                    operations[operation, outcome] = Operation(
                        old.objects + 1,
                        old.nbytes + nbytes,
                        old.seconds + took / len(ended),
                        max(old.slowest, took),
                    )
                self._now = replace(self._now, operations=operations)

    def add(self, *, retries: int = 0, dropped: int = 0, copied: int = 0) -> None:
        """Adds to the plain counts."""
        with self._lock:
            now = self._now
            self._now = replace(
                now, retries=now.retries + retries, dropped=now.dropped + dropped, copied=now.copied + copied
            )

    def breaker(self, state: str) -> None:
        """Notes the breaker's state."""
        with self._lock:
            opened = self._now.opened + (state == "open" and self._now.breaker != "open")
            self._now = replace(self._now, breaker=state, opened=opened)

    def snapshot(self) -> Counters:
        """The counts now."""
        with self._lock:
            return replace(self._now, operations=dict(self._now.operations))
