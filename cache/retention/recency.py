"""The peers' rules: least recently used first, and what each of them makes and spares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from immutables import Map

from cache.retention.protocol import Boundary, Creation


class Recency(NamedTuple):
    """A `Policy`: gives up what was used longest ago; only the boundary that a request resumes from counts as used.

    Attributes:
        creation: where prefills make checkpoints.
        per_path: most checkpoints of one path that are treated alike: of more, those that are too many are given up
            before anything else, the shallowest first, except forks and the deepest. None for any number.
        order: keys of what is held, by when they were used, in numbers that only grow.
        numbers: the same the other way round.
        first: the smallest number.
        next_number: for the next use.
        parents: of each remembered boundary.
        forks: how many remembered boundaries have it as their parent.
    """

    creation: Creation = Creation()
    per_path: int | None = None
    order: Map[int, bytes] = Map()
    numbers: Map[bytes, int] = Map()
    first: int = 0
    next_number: int = 0
    parents: Map[bytes, bytes | None] = Map()
    forks: Map[bytes | None, int] = Map()

    def made(self, boundary: Boundary, now: float) -> Recency:
        """A boundary is remembered; its place in the tree matters to a cap by path alone."""
        if self.per_path is None:
            return self
        key, above, behind = boundary.key, boundary.parent, boundary.children
        parents = self.parents.update({key: above, **dict.fromkeys(behind, key)})
        forks = self.forks.update({key: len(behind), above: self.forks.get(above, 0) + 1 - len(behind)})
        return self._replace(parents=parents, forks=forks)

    def held(self, key: bytes, now: float) -> Recency:
        """Its bytes are there: it is the one that was used last."""
        after = self._at(key, self.next_number, next_number=self.next_number + 1)
        for surplus in after._surplus(key):
            after = after._at(surplus, after.first - 1)
        return after

    def used(self, path: Sequence[bytes], hit: bytes | None, now: float) -> Recency:
        """A request resumed from `hit`."""
        if hit is None or hit not in self.numbers:
            return self
        return self._at(hit, self.next_number, next_number=self.next_number + 1)

    def dropped(self, key: bytes, now: float) -> Recency:
        """Its bytes are gone."""
        order = self.order.delete(self.numbers[key])
        numbers = self.numbers.delete(key)
        return self._replace(order=order, numbers=numbers, first=self._first(order, self.first))

    def forgotten(self, key: bytes) -> Recency:
        """It is no longer remembered."""
        if self.per_path is None:
            return self
        above = self.parents[key]
        behind = [child for child, parent in self.parents.items() if parent == key]
        parents = self.parents.delete(key).update(dict.fromkeys(behind, above))
        forks = self.forks.delete(key)
        return self._replace(parents=parents, forks=forks.set(above, forks[above] - 1 + len(behind)))

    def victims(self, nbytes: int, now: float) -> Iterator[bytes]:
        """Held boundaries, the one that was used longest ago first."""
        numbers = (self.order.get(number) for number in range(self.first, self.next_number))
        return (key for key in numbers if key is not None)

    def worth(self, key: bytes, now: float) -> float:
        """The number of its last use."""
        return self.numbers[key]

    def _at(self, key: bytes, number: int, *, next_number: int | None = None) -> Recency:
        """With another place in the order for a key."""
        old, order = self.numbers.get(key), self.order.set(number, key)
        order = order if old is None else order.delete(old)
        next_number = self.next_number if next_number is None else next_number
        first, numbers = self._first(order, min(self.first, number)), self.numbers.set(key, number)
        return self._replace(order=order, numbers=numbers, first=first, next_number=next_number)

    def _first(self, order: Map[int, bytes], at: int) -> int:
        """The first number in use from `at` on."""
        while at < self.next_number and at not in order:
            at += 1
        return at

    def _surplus(self, key: bytes) -> list[bytes]:
        """What a path has too much, the deepest first."""
        if self.per_path is None:
            return []
        path, at = [], self.parents[key]
        while at is not None:
            if at in self.numbers:
                path.append(at)
            at = self.parents[at]
        single = [each for each in reversed(path) if self.forks[each] < 2]
        return single[: max(0, len(path) + 1 - self.per_path)][::-1]
