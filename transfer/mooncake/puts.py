"""From pieces in the caller's memory to objects in the store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np

from transfer.counters import Recorder
from transfer.mooncake.call import Call, batches
from transfer.mooncake.codes import BUSY, EXISTS, FAILED, UNFINISHED, outcome
from transfer.mooncake.library import Library
from transfer.mooncake.memory import Memory
from transfer.mooncake.settings import MIB
from transfer.objects import Bytes, Item

STRAIGHT = MIB  # bytes of a piece from which on a transfer of its own costs less than a copy
AGAIN = frozenset(
    {"full", "transfer", "unfinished", "absent"}
)  # room comes, writers end, what was there may go
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
                self._put([items[i] for i in batch], call, batch)
            todo = [i for i in todo if call.ended[i] in AGAIN]
            if not todo or tries + 1 == self._tries or not call.pause(tries):
                return
            self._recorder.add(retries=len(todo))

    def _put(self, items: Sequence[Item], call: Call, places: Sequence[int]) -> None:
        """Of several writers of a name, in any processes, Mooncake lets one begin."""
        store = self._library.store
        groups = self._library.grouped([item.group or item.key for item in items])
        begun = store.batch_put_session_start(
            [item.key for item in items], [item.nbytes for item in items], groups
        )
        mine = [n for n, code in enumerate(begun) if code == 0]
        codes = [{0: FAILED, BUSY: UNFINISHED}.get(code, code) for code in begun]
        try:
            for n, nbytes in zip(mine, self._write([items[n] for n in mine])):
                codes[n] = 0 if nbytes == items[n].nbytes else min(nbytes, FAILED)
            whole = [n for n in mine if codes[n] == 0]
            for n, code in zip(whole, store.batch_put_session_end([items[n].key for n in whole])):
                codes[n] = code
        finally:
            store.batch_put_session_revoke([items[n].key for n in mine if codes[n]])
        for item, place, code in zip(items, places, codes):
            if code in (0, EXISTS):
                call.ended[place] = self._verified(item, "held" if code else "stored")
            else:
                call.ended[place] = outcome(code)

    def _verified(self, item: Item, word: str) -> str:
        size = self._library.store.get_size(item.key)
        return outcome(size) if size < 0 else word if size == item.nbytes else "conflict"

    def _write(self, items: Sequence[Item]) -> list[int]:
        """Bytes that were written of each object, or a code."""
        if not items:
            return []
        staged = [sum(piece.nbytes for piece in item.pieces if self._is_staged(piece)) for item in items]
        with self._memory.lent([sum(staged)] if any(staged) else []) as blocks:
            ends = accumulate(staged)
            rooms = [blocks[0][end - nbytes : end] if blocks else EMPTY for nbytes, end in zip(staged, ends)]
            runs = [self._runs(item, room) for item, room in zip(items, rooms)]
            self._recorder.add(copied=sum(staged))
            return self._library.store.batch_put_from_multi_buffer_ranges(
                [item.key for item in items],
                [[address for address, _ in run] for run in runs],
                [[nbytes for _, nbytes in run] for run in runs],
                [list(accumulate((nbytes for _, nbytes in run[:-1]), initial=0)) for run in runs],
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
