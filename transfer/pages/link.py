"""Pushing pages into another process's pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import index
from typing import Self

from transfer.errors import Closed
from transfer.pages.descriptor import LIMIT, Descriptor, Plane
from transfer.pages.inbox import Arrival, Inbox
from transfer.pages.outbox import Outbox, Sent
from transfer.pages.outcome import Outcome
from transfer.pages.pool import Pool
from transfer.pages.wire import Order, Wire, control_bytes


class PageLink:
    """One process's end: it pushes pages of its pool into peers' pools, and peers push into its own.

    A receiver gives its `descriptor` to senders once, and for each push opens an attempt and tells the sender its
    number and pages, over any channel. It learns from `poll` what became of it. What a page holds, nobody asks.
    All calls may come from any thread.
    """

    def __init__(self, pool: Pool, peer: str, epoch: int, wire: Wire, settle: float = 1.0) -> None:
        """Registers the pool.

        Args:
            pool: its memory is the link's until `close` has returned.
            peer: this side's name, the same after a restart.
            epoch: of this start, larger than those before, as `time.time_ns()`.
            settle: seconds that pages rest after a broken push (see `Inbox`).

        Raises:
            ValueError: an epoch or a name that no descriptor can have, or a negative rest.
            Unavailable: the library did not take the memory.
        """
        if not (0 < epoch < LIMIT and settle >= 0):
            raise ValueError(f"{epoch=} is in 1 .. 2**64 - 1 and {settle=} is not negative")
        self._pool, self._wire = pool, wire
        self._control = control_bytes(epoch)
        wire.register([self._control, *pool.planes.values()])
        self._descriptor = Descriptor(
            peer=peer,
            epoch=epoch,
            address=wire.address,
            control=self._control.ctypes.data,
            page_nbytes=pool.page_nbytes,
            num_pages=pool.num_pages,
            planes=tuple(Plane(name, plane.ctypes.data) for name, plane in pool.planes.items()),
        )
        self._inbox = Inbox(pool.num_pages, epoch, settle)
        self._outbox = Outbox(pool)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def descriptor(self) -> Descriptor:
        """What senders need."""
        return self._descriptor

    def open(self, pages: Sequence[int]) -> int:
        """Expects one push into these pages; see `Inbox.open`."""
        with self._lock:
            self._check_open()
            return self._inbox.open(pages)

    def abandon(self, attempt: int) -> None:
        """Stops waiting for an attempt, whose pages stay held until nothing can write to them; see `Inbox.abandon`."""
        with self._lock:
            self._check_open()
            self._inbox.abandon(attempt)

    def gone(self, attempt: int) -> None:
        """Says that an attempt's sender writes no more: its process ended, or `Outcome.untouched`; see `Inbox.gone`."""
        with self._lock:
            self._check_open()
            self._inbox.gone(attempt)

    def poll(self) -> list[Arrival]:
        """What became of attempts since the last call. Call it often: `settle` only counts between calls."""
        with self._lock:
            self._check_open()
            for notice in self._wire.notices():
                self._inbox.hear(notice)
            return self._inbox.tick(self._wire.now())

    @property
    def held(self) -> frozenset[int]:
        """Pages of this pool that peers may still write to: neither read nor used for anything else."""
        with self._lock:
            return self._inbox.held

    @property
    def lent(self) -> frozenset[int]:
        """Pages of this pool that the library may still read for a push, also a late one: not to be given back."""
        return self._outbox.lent

    @property
    def running(self) -> frozenset[Sent]:
        """This side's pushes that the library has not ended.

        A receiver that heard nothing may ask for them over another channel: an attempt that is not among them will
        not be written to any more (`gone`).
        """
        return self._outbox.running

    def push(
        self,
        descriptor: Descriptor,
        attempt: int,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        timeout: float,
    ) -> Outcome:
        """Writes each local page over the remote page of the same place in the list, in all planes.

        Pages that follow each other on both sides go as one piece. The receiver hears of `DONE`, `FAILED` and `LATE`
        by itself, as soon as the library has ended, also when that is long after this call.

        Args:
            descriptor, attempt, remote_pages: from the receiver; one attempt is pushed once.
            local_pages: as many. They are not changed before this returns, nor while they are `lent`.
            timeout: seconds until this returns.

        Raises:
            Closed: after `close`.
            ValueError: a local page outside of the pool, lists of different lengths or none, or a timeout that is not
                positive and finite.
        """
        if not 0 < timeout < threading.TIMEOUT_MAX:
            raise ValueError(f"{timeout=} is not positive and finite; give the seconds that a push may take")
        with self._lock:
            self._check_open()
        attempt = index(attempt)
        sent = Sent(descriptor.peer, descriptor.epoch, attempt)
        runs = self._outbox.take(descriptor, attempt, local_pages, remote_pages)
        if isinstance(runs, Outcome):
            return runs
        nbytes = self._pool.page_nbytes
        order = Order(descriptor, attempt, [], [], lambda: self._outbox.give_back(sent))
        for name, address in descriptor.planes:
            for run in runs:
                start = run.local * nbytes
                order.sources.append(self._pool.planes[name][start : start + run.count * nbytes])
                order.targets.append(address + run.remote * nbytes)
        return self._wire.send(order, timeout)

    def close(self) -> None:
        """Refuses peers, then lets go of the pool. A second close does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._control[:] = 0
        self._wire.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the link of {self._descriptor.peer} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
