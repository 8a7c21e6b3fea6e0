"""Who is worth least, without a look at all that is held."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from cache.retention.forest import Remembered


class Guesses:
    """Guesses of what held boundaries are worth. No part of a version: each is looked up before it is believed, and
    whatever a version changes is guessed anew.

    Attributes:
        doubtful: whose guess may be too high.
    """

    def __init__(self, members: Mapping[bytes, Remembered]) -> None:
        """`members` are those that are laid out, by key."""
        self.doubtful: dict[Remembered, object] = {}
        self._members = members
        self._noted: list[tuple[float, bytes]] = []
        self._of: dict[bytes, float] = {}
        """The guess that counts, by key; it is noted, and no held boundary that is not doubtful is worth less."""

    def settle(self) -> None:
        """Leaves nobody doubtful."""
        for member in self.doubtful:
            key = member.key
            if member.held and key:
                worth = member.worth
                if worth < self._of.get(key, math.inf):
                    self._of[key] = worth
                    heapq.heappush(self._noted, (worth, key))
        self.doubtful.clear()

    def first(self) -> bytes | None:
        """The held boundary that is worth least; of equals, the one with the smallest key."""
        self.settle()
        noted, guesses, members = self._noted, self._of, self._members
        while noted:
            guess, key = noted[0]
            if guesses.get(key) != guess:
                heapq.heappop(noted)
                continue
            member = members.get(key)
            if member is None or not member.held:
                heapq.heappop(noted)
                del guesses[key]
                continue
            worth = member.worth
            if worth <= guess:
                return key
            guesses[key] = worth
            heapq.heapreplace(noted, (worth, key))
        return None
