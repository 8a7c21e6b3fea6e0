"""Objects that this process keeps account of itself, wherever their bytes lie."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from transfer.calls import Gate, check_keys, check_puts, check_reads, deadline
from transfer.counters import Counters, Recorder
from transfer.ledger import Group, Ledger, group_of
from transfer.objects import Bytes, Item, Put, Read


class Found(NamedTuple):
    """How reading an object ended, and the bytes of a hit.

    Attributes:
        outcome: `hit`, `absent`, `short` (the range reaches beyond its end), `damaged` (not as it was written), `late`
            or `failed`.
        raw: what was asked for.
    """

    outcome: str
    raw: Bytes | None = None


class Held(NamedTuple):
    """An object that a place holds: its key, length in bytes and group."""

    key: str
    nbytes: int
    group: str | None


class Place(Protocol):
    """Where the bytes lie. No two calls write or drop one object at a time."""

    def cost(self, key: str, nbytes: int, group: str | None) -> int:
        """What an object of this length takes of a budget."""
        ...

    def write(self, item: Item, until: float) -> Put:
        """Writes an object that is not there, whole or not at all: also if it raises OSError or MemoryError."""
        ...

    def read(self, read: Read, nbytes: int, until: float) -> Found:
        """Reads of an object of `nbytes`, into fresh memory at a multiple of 64 bytes. It may be dropped meanwhile.

        Raises OSError or MemoryError if that is not possible.
        """
        ...

    def drop(self, key: str) -> None:
        """Removes an object, if it is there. Raises OSError if that is not possible."""
        ...

    def damaged(self, key: str, nbytes: int) -> bool:
        """Whether an object is not there as a whole."""
        ...

    def close(self) -> None:
        """Gives all back."""
        ...


class LocalObjects:
    """An `Objects` over a place, within a budget. Groups are dropped whole, the one used longest ago first.

    The objects of one `put` do not drop each other: what has no room beside the others is `Put.FULL`.
    """

    def __init__(self, place: Place, budget_nbytes: int | None, held: Sequence[Held] = ()) -> None:
        """Over a place.

        Args:
            place: where the bytes lie.
            budget_nbytes: the most that all objects may cost there; None for no limit.
            held: what the place holds, what was used last comes last. Groups beyond the budget are dropped.
        """
        self._place = place
        self._recorder = Recorder()
        self._ledger = Ledger(budget_nbytes, place.drop, self._evicted, place.cost)
        self._gate = Gate(type(self).__name__)
        for key, nbytes, group in held:
            self._ledger.restore(key, nbytes, group)
        self._ledger.shrink()

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        """See `Objects`."""
        check_puts(items)
        until, keep = deadline(timeout), {group_of(item.key, item.group) for item in items}
        puts: list[Put] = []
        with self._gate.call(), self._recorder.call("put") as ended:
            for item in items:
                puts.append(self._put(item, keep, until))
                stored = item.nbytes if puts[-1] is Put.STORED else 0
                ended.append((puts[-1].value, stored))
                self._recorder.add(copied=stored, dropped=puts[-1] in (Put.FULL, Put.FAILED, Put.LATE))
        return puts

    def get(self, reads: Sequence[Read], timeout: float) -> list[Bytes | None]:
        """See `Objects`. What is read begins at a multiple of 64 bytes."""
        check_reads(reads)
        until = deadline(timeout)
        with self._gate.call(), self._recorder.call("get") as ended:
            found = [self._read(read, until) for read in reads]
            ended += [(outcome, 0 if raw is None else raw.nbytes) for outcome, raw in found]
            self._recorder.add(copied=sum(nbytes for _, nbytes in ended))
        return [one.raw for one in found]

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """See `Objects`. Does not count as use."""
        check_keys(keys)
        deadline(timeout)
        with self._gate.call(), self._recorder.call("contains") as ended:
            held = [self._ledger.holds(key) for key in keys]
            ended += [("hit" if there else "absent", 0) for there in held]
        return held

    def remove(self, keys: Sequence[str], timeout: float, force: bool = False) -> list[bool]:
        """See `Objects`. What is being read can always be removed, and is read as it was."""
        check_keys(keys)
        until = deadline(timeout)
        with self._gate.call(), self._recorder.call("remove") as ended:
            gone = [self._ledger.remove(key, until) for key in keys]
            ended += [("removed" if away else "failed", 0) for away in gone]
        return gone

    def counters(self) -> Counters:
        """See `Objects`. What was dropped for others is counted under `evict`."""
        return self._recorder.snapshot()

    def close(self) -> None:
        """See `Objects`."""
        if self._gate.close():
            self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, item: Item, keep: Collection[Group], until: float) -> Put:
        if monotonic() >= until:
            return Put.LATE
        if (other := self._ledger.claim(item, keep, until)) is not None:
            return other
        put = Put.FAILED
        try:
            put = self._place.write(item, until)
        except MemoryError:
            put = Put.FULL
        except OSError as error:
            put = Put.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else Put.FAILED
        finally:
            self._ledger.settle(item.key, put is Put.STORED)
        return put

    def _read(self, read: Read, until: float) -> Found:
        nbytes = self._ledger.use(read.key)
        if nbytes is None:
            return Found("absent")
        if read.start + (read.nbytes or 0) > nbytes:
            return Found("short")
        if monotonic() >= until:
            return Found("late")
        try:
            found = self._place.read(read, nbytes, until)
        except (OSError, MemoryError):
            return Found("failed")
        if found.outcome in ("absent", "damaged"):
            self._ledger.remove(read.key, until, only_if=self._place.damaged)
        return found

    def _evicted(self, nbytes: int) -> None:
        with self._recorder.call("evict") as ended:
            ended.append(("evicted", nbytes))
