"""One call of a caller while a worker thread does it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from time import monotonic

from transfer.mooncake.settings import MIB
from transfer.objects import Bytes

BATCH_NBYTES = 64 * MIB  # most bytes of one library call that has several objects
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


class Call:
    """What has come of each object so far, and the time that is left. The caller may read it at any moment.

    Attributes:
        ended: a word for each object; `late` until more is known.
        values: what was read, set before its word.
    """

    def __init__(self, objects: int, until: float, closing: threading.Event) -> None:
        """`until` is of `monotonic`; `closing` ends the call before it."""
        self.ended = ["late"] * objects
        self.values: list[Bytes | None] = [None] * objects
        self._until, self._closing = until, closing

    def in_time(self) -> bool:
        """Whether to go on."""
        return monotonic() < self._until and not self._closing.is_set()

    def pause(self, tries: int) -> bool:
        """Waits before the next try, longer after more `tries`. Whether there is time for it."""
        seconds = min(FIRST_PAUSE_S * 2 ** min(tries, 8), LONGEST_PAUSE_S)
        return monotonic() + seconds < self._until and not self._closing.wait(seconds)


def batches(objects: Sequence[int], nbytes: Sequence[int]) -> Iterator[list[int]]:
    """Objects, by number, in groups of no more bytes than one library call moves."""
    group, total = [], 0
    for i in objects:
        if group and total + nbytes[i] > BATCH_NBYTES:
            yield group
            group, total = [], 0
        group.append(i)
        total += nbytes[i]
    if group:
        yield group
