"""When boundaries grow older, without a look at all of them."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import TypeAlias

from cache.retention.forest import Remembered
from cache.retention.rates import EDGES, NUM_BINS

Entry: TypeAlias = tuple[float, Remembered]
"""When an age began, and whose it is."""


class Ages:
    """Who comes into the next bin of age, and when. Guesses, and no part of a version: each is looked up before it is
    believed.

    Whose age began first leaves a bin first, so that each bin is a queue. None leaves the last one.
    """

    def __init__(self) -> None:
        self._queues: list[deque[Entry]] = [deque() for _ in range(NUM_BINS - 1)]

    def note(self, member: Remembered) -> None:
        """A boundary is in another bin, or its age began anew."""
        age_bin, since = member.stage[0], member.since
        if not 0 <= age_bin < len(self._queues):
            return
        queue = self._queues[age_bin]
        if queue and since < queue[-1][0]:  # someone went back to an older version
            insort(queue, (since, member), key=itemgetter(0))
        else:
            queue.append((since, member))

    def rebuild(self, members: Iterable[Remembered]) -> None:
        """Knows these, and nobody else."""
        for queue in self._queues:
            queue.clear()
        for member in sorted(members, key=attrgetter("since")):
            self.note(member)

    def advance(self, now: float) -> Iterator[tuple[Remembered, int, float]]:
        """Who comes into which bin until now, and when. It is there before the next one is asked for."""
        for after, queue in enumerate(self._queues, 1):
            age_bin, ends = after - 1, EDGES[after]
            while queue and queue[0][0] + ends <= now:
                since, member = queue.popleft()
                if member.since == since and member.stage[0] == age_bin:
                    yield member, after, since + ends
                    self.note(member)
