"""The sender's side of pushes: what may go out, and what the library still reads. No I/O here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import index
from typing import NamedTuple

from transfer.pages.descriptor import Descriptor
from transfer.pages.outcome import Outcome
from transfer.pages.pool import Pool
from transfer.pages.runs import Run, coalesce

REMEMBERED = 1 << 16
"""Pushes that are known not to be sent twice."""


class Sent(NamedTuple):
    """One push, seen from anywhere: the receiver, its start, and its number there."""

    peer: str
    epoch: int
    attempt: int


class Outbox:
    """Pushes, from `take` until the library has ended."""

    def __init__(self, pool: Pool) -> None:
        """Nothing sent yet; `pool` is this side's."""
        self._pool = pool
        self._lock = threading.Lock()
        self._epochs: dict[str, int] = {}
        self._sent: dict[Sent, None] = {}
        self._running: dict[Sent, frozenset[int]] = {}

    def take(
        self, descriptor: Descriptor, attempt: int, local: Sequence[int], remote: Sequence[int]
    ) -> list[Run] | Outcome:
        """The runs to write, whose pages are lent from here on; or why not, and nothing is lent.

        Raises:
            ValueError: what `PageLink.push` says.
        """
        local, remote = [index(page) for page in local], [index(page) for page in remote]
        last = self._pool.num_pages - 1
        if wrong := sorted({page for page in local if not 0 <= page <= last}):
            raise ValueError(f"local pages {wrong} are not in 0 .. {last}")
        if len(local) != len(remote) or not local:
            raise ValueError(
                f"{len(local)} local and {len(remote)} remote pages; give as many of both, one at least"
            )
        if len(set(remote)) < len(remote) or min(remote) < 0 or max(remote) >= descriptor.num_pages:
            return Outcome.BOUNDS
        if {plane.name for plane in descriptor.planes} != self._pool.planes.keys():
            return Outcome.LAYOUT
        if descriptor.page_nbytes != self._pool.page_nbytes:
            return Outcome.LAYOUT
        sent = Sent(descriptor.peer, descriptor.epoch, attempt)
        with self._lock:
            newest = self._epochs[sent.peer] = max(sent.epoch, self._epochs.get(sent.peer, 0))
            if sent.epoch < newest:
                return Outcome.STALE
            if sent in self._sent:
                return Outcome.REPEATED
            self._sent[sent] = None
            if len(self._sent) > REMEMBERED:
                del self._sent[next(iter(self._sent))]
            self._running[sent] = frozenset(local)
        return coalesce(local, remote)

    def give_back(self, sent: Sent) -> None:
        """The library has ended with it."""
        with self._lock:
            del self._running[sent]

    @property
    def running(self) -> frozenset[Sent]:
        """What the library has not ended with."""
        with self._lock:
            return frozenset(self._running)

    @property
    def lent(self) -> frozenset[int]:
        """The local pages of these."""
        with self._lock:
            return frozenset().union(*self._running.values())
