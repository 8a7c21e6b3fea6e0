"""From pieces in the caller's memory to objects in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import accumulate

import numpy as np

from transfer.beside import ahead
from transfer.counters import Recorder
from transfer.mooncake.call import Call, batches
from transfer.mooncake.codes import BUSY, EXISTS, FAILED, LATE, UNFINISHED, outcome
from transfer.mooncake.library import Library
from transfer.mooncake.memory import Memory
from transfer.mooncake.settings import MIB
from transfer.mooncake.strides import Runs, stage, staged_nbytes, strides
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
            for n, nbytes in zip(mine, self._write([items[n] for n in mine], call)):
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

    def _write(self, items: Sequence[Item], call: Call) -> list[int]:
        """Bytes that were written of each object, or a code. A stride is copied while the one before it is sent."""
        written = [0] * len(items)
        todo = strides(items, self._is_staged) if items else []
        copies = [staged_nbytes(stride) for stride in todo]
        self._recorder.add(copied=sum(copies))
        with self._memory.lent([max(copies)] * min(len(copies), 2) if any(copies) else []) as rooms:
            turns = [(stride, rooms[i % 2] if rooms else EMPTY) for i, stride in enumerate(todo)]
            with closing(ahead(lambda turn: stage(*turn), turns)) as staged:
                for i, runs in enumerate(staged):
                    if i and not call.in_time():
                        return [
                            LATE if 0 <= done < item.nbytes else done for item, done in zip(items, written)
                        ]
                    self._send(items, runs, written)
        return written

    def _send(self, items: Sequence[Item], runs: Mapping[int, Runs], written: list[int]) -> None:
        """Writes the next bytes of the objects that nothing has failed of, and adds them up."""
        live = {n: run for n, run in runs.items() if written[n] >= 0}
        if not live:
            return
        codes = self._library.store.batch_put_from_multi_buffer_ranges(
            [items[n].key for n in live],
            [[address for address, _ in run.runs] for run in live.values()],
            [[nbytes for _, nbytes in run.runs] for run in live.values()],
            [
                list(accumulate((nbytes for _, nbytes in run.runs[:-1]), initial=run.offset))
                for run in live.values()
            ],
        )
        for (n, run), code in zip(live.items(), codes, strict=True):
            written[n] = written[n] + code if code == run.nbytes else min(code, FAILED)

    def _is_staged(self, piece: Bytes) -> bool:
        return self._from is None or piece.nbytes < self._from
