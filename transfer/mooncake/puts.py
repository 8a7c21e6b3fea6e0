"""From pieces in the caller's memory to objects in the store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np

from transfer.counters import Recorder
from transfer.mooncake.call import Call, batches
from transfer.mooncake.codes import outcome
from transfer.mooncake.library import Library
from transfer.mooncake.memory import Memory
from transfer.mooncake.settings import MIB
from transfer.objects import Bytes, Item

STRAIGHT = MIB  # bytes of a piece from which on a transfer of its own costs less than a copy
COMPARED = MIB // 16  # bytes up to which an object is read back, as manifests are
AGAIN = frozenset({"full", "transfer", "unfinished"})  # another moment, or another process, may have room
EMPTY = np.empty(0, np.uint8)


class Puts:
    """Stores objects. Pieces that are large go straight from where they lie, small ones through registered memory; over
    RDMA all do, as the caller's memory is not registered.
    """

    def __init__(
        self, library: Library, memory: Memory, recorder: Recorder, *, straight: bool, tries: int
    ) -> None:
        self._library, self._memory, self._recorder, self._tries = library, memory, recorder, tries
        self._from = STRAIGHT if straight else None

    def put(self, items: Sequence[Item], call: Call) -> None:
        """Stores what is not there, verifies it, and tries again what may succeed then."""
        todo, nbytes = list(range(len(items))), [item.nbytes for item in items]
        for tries in range(self._tries):
            for batch in batches(todo, nbytes):
                for i in batch:
                    call.ended[i] = "late"
                if not call.in_time():
                    return
                self._put([items[i] for i in batch], batch, call)
            todo = [i for i in todo if call.ended[i] in AGAIN]
            if not todo or tries + 1 == self._tries or not call.pause(tries):
                return
            self._recorder.add(retries=len(todo))

    def _put(self, items: Sequence[Item], places: Sequence[int], call: Call) -> None:
        there = self._library.store.batch_is_exist([item.key for item in items])
        absent = [n for n, code in enumerate(there) if code == 0]
        sent = dict(zip(absent, self._send([items[n] for n in absent])))
        for n, (item, place) in enumerate(zip(items, places)):
            code = min(there[n], sent.get(n, 0))
            call.ended[place] = outcome(code) if code < 0 else self._verified(item, n in sent)

    def _verified(self, item: Item, sent: bool) -> str:
        """A put that was told that all is well may have stored nothing: another writer's object was in its place. If
        that has the same size, only its bytes tell, and only of small objects are they read.
        """
        size = self._library.store.get_size(item.key)
        if size < 0:
            return outcome(size)
        if size != item.nbytes:
            return "conflict"
        return "held" if not sent or (size <= COMPARED and self._is_anothers(item)) else "stored"

    def _is_anothers(self, item: Item) -> bool:
        with self._memory.lent([item.nbytes]) as (room,):
            whole = [[[item.nbytes]]]
            read = self._library.store.get_into_ranges(
                [room.ctypes.data], [[item.key]], [[[0]]], [[[0]]], whole
            )
            return read == whole and room.tobytes() != b"".join(piece.tobytes() for piece in item.pieces)

    def _send(self, items: Sequence[Item]) -> list[int]:
        """A code for each object."""
        if not items:
            return []
        staged = [sum(piece.nbytes for piece in item.pieces if self._is_staged(piece)) for item in items]
        with self._memory.lent([sum(staged)] if any(staged) else []) as blocks:
            ends = accumulate(staged)
            rooms = [blocks[0][end - nbytes : end] if blocks else EMPTY for nbytes, end in zip(staged, ends)]
            runs = [self._runs(item, room) for item, room in zip(items, rooms)]
            self._recorder.add(copied=sum(staged))
            return self._library.store.batch_put_from_multi_buffers(
                [item.key for item in items],
                [[address for address, _ in run] for run in runs],
                [[nbytes for _, nbytes in run] for run in runs],
                self._library.grouped([item.group or item.key for item in items]),
            )

    def _runs(self, item: Item, room: Bytes) -> list[tuple[int, int]]:
        """Where the object's bytes lie, as (address, bytes); the small pieces are copied to `room`."""
        runs: list[tuple[int, int]] = []
        for small, group in groupby(item.pieces, self._is_staged):
            pieces = list(group)
            if small:
                nbytes = sum(piece.nbytes for piece in pieces)
                pieces, room = [np.concatenate(pieces, out=room[:nbytes])], room[nbytes:]
            for piece in pieces:
                extend(runs, piece)
        return runs

    def _is_staged(self, piece: Bytes) -> bool:
        return self._from is None or piece.nbytes < self._from


def extend(runs: list[tuple[int, int]], piece: Bytes) -> None:
    """Adds a piece to runs of (address, bytes): to the last one if it begins where that ends."""
    if not piece.nbytes:
        return
    address = piece.ctypes.data
    if runs and sum(runs[-1]) == address:
        runs[-1] = (runs[-1][0], runs[-1][1] + piece.nbytes)
    else:
        runs.append((address, piece.nbytes))
