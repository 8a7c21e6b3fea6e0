"""Objects in the memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import Self

from transfer.aligned import join
from transfer.calls import Gate, check_keys, check_puts, check_reads, deadline
from transfer.counters import Counters, Recorder
from transfer.ledger import Ledger, group_of
from transfer.objects import Bytes, Item, Put, Read


class MemoryObjects:
    """An `Objects` that holds copies. Groups are dropped whole, the one that was used longest ago first."""

    def __init__(self, budget_nbytes: int | None = None) -> None:
        """`budget_nbytes` is the most bytes of all objects; None for no limit."""
        self._values: dict[str, Bytes] = {}
        self._ledger = Ledger(budget_nbytes, self._drop)
        self._recorder = Recorder()
        self._gate = Gate("MemoryObjects")

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        """See `Objects`. A deadline ends the waiting, not a copy that has begun."""
        check_puts(items)
        until, keep = deadline(timeout), {group_of(item.key, item.group) for item in items}
        outcomes: list[Put] = []
        with self._gate.call(), self._recorder.call("put") as ended:
            for item in items:
                outcomes.append(self._ledger.claim(item, keep, until) or self._store(item))
                ended.append((outcomes[-1].value, item.nbytes if outcomes[-1] is Put.STORED else 0))
        return outcomes

    def get(self, reads: Sequence[Read], timeout: float) -> list[Bytes | None]:
        """See `Objects`. What is read begins at a multiple of 64 bytes."""
        check_reads(reads)
        until = deadline(timeout)
        found: list[Bytes | None] = []
        with self._gate.call(), self._recorder.call("get") as ended:
            for read in reads:
                outcome, raw = self._read(read) if monotonic() < until else ("late", None)
                found.append(raw)
                ended.append((outcome, 0 if raw is None else raw.nbytes))
        return found

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """See `Objects`. Does not count as use."""
        check_keys(keys)
        deadline(timeout)
        with self._gate.call(), self._recorder.call("contains") as ended:
            held = [self._ledger.holds(key) for key in keys]
            ended += [("hit" if there else "absent", 0) for there in held]
        return held

    def remove(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """See `Objects`."""
        check_keys(keys)
        until = deadline(timeout)
        with self._gate.call(), self._recorder.call("remove") as ended:
            gone = [self._ledger.remove(key, until) for key in keys]
            ended += [("removed" if away else "late", 0) for away in gone]
        return gone

    def counters(self) -> Counters:
        """See `Objects`."""
        return self._recorder.snapshot()

    def close(self) -> None:
        """See `Objects`. What was held is gone."""
        self._gate.close()
        self._values.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _store(self, item: Item) -> Put:
        stored = False
        try:
            self._values[item.key] = join(item.pieces)
            self._recorder.add(copied=item.nbytes)
            stored = True
        except MemoryError:
            return Put.FULL
        finally:
            self._ledger.settle(item.key, stored)
        return Put.STORED

    def _read(self, read: Read) -> tuple[str, Bytes | None]:
        if self._ledger.use(read.key) is None:
            return "absent", None
        value = self._values.get(read.key)
        if value is None:  # dropped since
            return "absent", None
        end = value.nbytes if read.nbytes is None else read.start + read.nbytes
        if not read.start <= end <= value.nbytes:
            return "short", None
        raw = join([value[read.start : end]])
        self._recorder.add(copied=raw.nbytes)
        return "hit", raw

    def _drop(self, key: str) -> None:
        self._values.pop(key, None)
