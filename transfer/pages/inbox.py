"""The receiver's side of pushes: which pages may be written to from outside, and when that has ended.

Bytes may arrive after a push has failed: its sender waits no longer, but the library and the network still hold what
they were given. So pages are used again only when it is known that nothing more comes. No I/O and no clock here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from operator import index
from typing import NamedTuple


class News(Enum):
    """What a sender says of an attempt, once."""

    WHOLE = "whole"
    """Every byte is in the receiver's memory."""
    VOID = "void"
    """Not all bytes are there, or their sender had given up before they were, and no more come."""
    BROKEN = "broken"
    """Not all bytes are there. The sender's library has stopped; what it gave to the network before may still come."""


class Notice(NamedTuple):
    """A sender's message.

    Attributes:
        epoch: of the receiver's start that is meant.
        attempt: the receiver's number for the push.
    """

    epoch: int
    attempt: int
    news: News


class Change(Enum):
    """What became of an attempt's pages."""

    WHOLE = "whole"
    """They hold what was pushed, and nobody writes to them any more: they are the receiver's. Last."""
    FAILED = "failed"
    """The push failed; they may still be written to. `FREE` follows."""
    FREE = "free"
    """What they hold is worth nothing, and nobody writes to them any more. Last."""


class Arrival(NamedTuple):
    """A change, once."""

    attempt: int
    pages: tuple[int, ...]
    change: Change


class Inbox:
    """Attempts, from `open` to the last change."""

    def __init__(self, num_pages: int, epoch: int, settle: float) -> None:
        """No attempts yet.

        Args:
            num_pages: of the pool.
            epoch: notices of another one are ignored.
            settle: seconds that pages rest after a broken push, so that the network's buffers run empty. Only time
                that this process was awake for counts: of the time between two ticks, a quarter of `settle` at most.
        """
        self._num_pages, self._epoch, self._settle = num_pages, epoch, settle
        self._next, self._ticked = 1, 0.0
        self._open: dict[int, tuple[int, ...]] = {}
        self._abandoned: set[int] = set()
        self._resting: dict[int, float] = {}
        self._held: set[int] = set()
        self._heard: list[Notice] = []

    @property
    def held(self) -> frozenset[int]:
        """Pages that somebody outside may write to."""
        return frozenset(self._held)

    def open(self, pages: Sequence[int]) -> int:
        """Expects one push into these pages; returns its number, which is never used again in this epoch.

        Raises:
            ValueError: no pages, pages twice or outside of the pool, or held by an earlier attempt.
        """
        pages = [index(page) for page in pages]
        last = self._num_pages - 1
        if not pages or len(set(pages)) < len(pages) or min(pages) < 0 or max(pages) > last:
            raise ValueError(f"an attempt has distinct pages in 0 .. {last}, one at least; not {pages}")
        if taken := sorted(self._held.intersection(pages)):
            raise ValueError(
                f"pages {taken} may still be written to by an earlier attempt; wait for its last change"
            )
        attempt, self._next = self._next, self._next + 1
        self._open[attempt] = tuple(pages)
        self._held.update(pages)
        return attempt

    def hear(self, notice: Notice) -> None:
        """Takes a notice, for the next tick. One of another epoch, or of an attempt that has ended, changes nothing."""
        self._heard.append(notice)

    def abandon(self, attempt: int) -> None:
        """Waits for it no longer: its pages stay held until its sender's last word, and are free then, never whole.

        Of an attempt whose last change `tick` has given, this changes nothing.
        """
        if attempt in self._open:
            self._abandoned.add(attempt)

    def gone(self, attempt: int) -> None:
        """Says that its sender will not write any more, because it ended or refused: the pages rest, then are free."""
        self.hear(Notice(self._epoch, attempt, News.BROKEN))

    def tick(self, now: float) -> list[Arrival]:
        """The changes since the last tick, at `now` seconds of a clock that never goes back."""
        passed = min(now - self._ticked, self._settle / 4)
        self._ticked = now
        changes: list[Arrival] = []
        for attempt, left in list(self._resting.items()):
            self._resting[attempt] = left - passed
            if left <= passed:
                changes.append(self._end(attempt, Change.FREE))
        for notice in self._heard:
            if notice.epoch == self._epoch and notice.attempt in self._open.keys() - self._resting.keys():
                changes += self._told(notice.attempt, notice.news)
        self._heard.clear()
        return changes

    def _told(self, attempt: int, news: News) -> list[Arrival]:
        abandoned = attempt in self._abandoned
        if news is News.WHOLE and not abandoned:
            return [self._end(attempt, Change.WHOLE)]
        changes = [] if abandoned else [Arrival(attempt, self._open[attempt], Change.FAILED)]
        if news is News.BROKEN:
            self._resting[attempt] = self._settle
            return changes
        return [*changes, self._end(attempt, Change.FREE)]

    def _end(self, attempt: int, change: Change) -> Arrival:
        pages = self._open.pop(attempt)
        self._abandoned.discard(attempt)
        self._resting.pop(attempt, None)
        self._held.difference_update(pages)
        return Arrival(attempt, pages, change)
