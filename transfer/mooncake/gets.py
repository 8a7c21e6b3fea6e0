"""From objects in the store to memory that is the caller's alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from transfer.aligned import align, empty, join
from transfer.counters import Recorder
from transfer.mooncake.call import Call, batches
from transfer.mooncake.codes import SHORT, outcome
from transfer.mooncake.library import Store
from transfer.mooncake.memory import Memory
from transfer.mooncake.settings import MIB
from transfer.objects import Bytes, Read

OWN = MIB // 4  # bytes of a value from which on it gets a block of its own, and is not copied
BELIEVED = 64 * MIB  # a read that ends beyond takes no memory before the object's size is known


class Range(NamedTuple):
    """Bytes [start, start + nbytes) of an object, at least one."""

    key: str
    start: int
    nbytes: int


class Gets:
    """Reads ranges. What is large is read to a block that is then the caller's, what is small through a common one."""

    def __init__(self, store: Store, memory: Memory, recorder: Recorder, *, tries: int) -> None:
        self._store, self._memory, self._recorder, self._tries = store, memory, recorder, tries

    def get(self, reads: Sequence[Read], call: Call) -> None:
        """Reads each; what lost its lease meanwhile is read again."""
        ranges: dict[int, Range] = {}
        for i, read in enumerate(reads):
            if read.nbytes and read.start + read.nbytes <= BELIEVED:
                ranges[i] = Range(read.key, read.start, read.nbytes)
            elif not call.in_time():
                return
            elif part := self._sized(i, read, call):
                ranges[i] = part
        todo, nbytes = list(ranges), [ranges[i].nbytes if i in ranges else 0 for i in range(len(reads))]
        for tries in range(self._tries):
            for batch in batches(todo, nbytes):
                for i in batch:
                    call.ended[i] = "late"
                if not call.in_time():
                    return
                self._get({i: ranges[i] for i in batch}, call)
            todo = [i for i in todo if call.ended[i] == "expired"]
            if not todo or tries + 1 == self._tries or not call.pause(tries):
                return
            self._recorder.add(retries=len(todo))

    def _sized(self, i: int, read: Read, call: Call) -> Range | None:
        """What to read, by the object's size; None if that says how the read ends."""
        size = self._store.get_size(read.key)
        end = size if read.nbytes is None else read.start + read.nbytes
        if size < 0:
            call.ended[i] = outcome(size)
        elif not read.start <= end <= size:
            call.ended[i] = "short"
        elif read.start == end:
            call.values[i], call.ended[i] = empty(0), "hit"
        else:
            return Range(read.key, read.start, end - read.start)
        return None

    def _get(self, ranges: Mapping[int, Range], call: Call) -> None:
        own = [part.nbytes for part in ranges.values() if part.nbytes >= OWN]
        common = sum(align(part.nbytes) for part in ranges.values() if part.nbytes < OWN)
        with self._memory.lent([*own, common] if common else own) as blocks:
            places, end, free = [], 0, iter(blocks)
            for part in ranges.values():
                if part.nbytes >= OWN:
                    places.append(next(free))
                else:
                    places.append(blocks[-1][end : end + part.nbytes])
                    end += align(part.nbytes)
            codes = self._read(ranges.values(), places)
            for (i, part), place, code in zip(ranges.items(), places, codes, strict=True):
                if code != part.nbytes:
                    call.ended[i] = "short" if code >= 0 or code == SHORT else outcome(code)
                    continue
                if part.nbytes < OWN:
                    place = join([place])
                    self._recorder.add(copied=part.nbytes)
                call.values[i], call.ended[i] = place, "hit"

    def _read(self, ranges: Collection[Range], places: Sequence[Bytes]) -> list[int]:
        """Bytes that were read to each place, or a code."""
        ended = self._store.get_into_ranges(
            [place.ctypes.data for place in places],
            [[part.key] for part in ranges],
            [[[0]] for _ in places],
            [[[part.start]] for part in ranges],
            [[[part.nbytes]] for part in ranges],
        )
        return [code for [[code]] in ended]
