"""How soon boundaries of a class are used again, learned while they age."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.retention.versions import Journal

Class: TypeAlias = tuple[int | str, ...]
"""What is alike about boundaries, the coarsest trait first: `("branch", 0, 2)` lies in `("branch", 0)`."""
Table: TypeAlias = NDArray[np.float64]

NUM_BINS = 20
"""Ages are told apart by the power of two below them: under 1 s, under 2 s, under 4 s, ..., 3 days and more."""
EDGES = (0.0, *(2.0**b for b in range(NUM_BINS)))
_WIDTHS = np.diff(EDGES)

FIRST_CHANCE = 0.05
"""That a boundary is used in the next doubling of its age, before anything is known."""
LEAST_CHANCE = 0.001
"""The same, at least, at an age of which nothing is known but that younger ones were used as seldom."""
# so many events are believed to have borne out: this chance, that a class is like the one around it, and at each age
EVENTS_OF_PRIOR = 1.0
EVENTS_OF_CLASS = 2.0
EVENTS_OF_AGE = 20.0


def age_bin(age: float) -> int:
    """The bin of an age in seconds."""
    return min(int(age).bit_length(), NUM_BINS - 1) if age >= 1 else 0


def hazards(uses: Table, seconds: Table, parents: NDArray[np.int64], depths: NDArray[np.int64]) -> Table:
    """Uses a second, by class and bin.

    A class takes the shape of the class around it, scaled by how much more often its members were used than that would
    have them, and departs from it bin by bin as far as it has seen events there.

    Args:
        uses: `[classes, bins]`, of members of the class itself and of the classes inside it.
        seconds: that these members spent in the bin.
        parents: the class around each, `[classes]`; row 0 is the class of everything.
        depths: how many classes are around each.
    """
    rates = np.empty_like(uses)
    chance = FIRST_CHANCE
    for b, width in enumerate(_WIDTHS):
        expected = max(chance, LEAST_CHANCE) / width
        rates[0, b] = (uses[0, b] + EVENTS_OF_PRIOR) / (seconds[0, b] + EVENTS_OF_PRIOR / expected)
        chance = rates[0, b] * width
    for depth in range(1, int(depths.max()) + 1):
        at = np.flatnonzero(depths == depth)
        around = rates[parents[at]]
        scale = (uses[at].sum(1) + EVENTS_OF_CLASS) / ((seconds[at] * around).sum(1) + EVENTS_OF_CLASS)
        expected = scale[:, None] * around
        rates[at] = (uses[at] + EVENTS_OF_AGE) / (seconds[at] + EVENTS_OF_AGE / expected)
    return rates


def best_rates(rates: Table) -> Table:
    """What holding a boundary of an age is worth in uses a second, `[classes, bins]`, if it is held as long as is best.

    Holding it from the middle of its bin up to the end of a later one brings one use with some chance and takes some
    expected time; the rate is the largest ratio of the two over all ends. So a boundary that will be used in a minute
    or never keeps its rate through that minute.

    Source: Gittins, "Bandit processes and dynamic allocation indices", 1979.
    """
    rates, widths = np.ascontiguousarray(rates.T), _WIDTHS[:, None]  # [bins, classes], in long runs
    used = rates * widths
    stays, seconds = np.exp(-used), -np.expm1(-used) / rates
    unused = np.exp(-used / 2)
    time = -np.expm1(-used / 2) / rates
    best = rates.copy()
    for ahead in range(1, NUM_BINS):
        # to the end of the bin that lies so many ahead, from each that has one there
        alive, spent = unused[:-ahead], time[:-ahead]
        spent += alive * seconds[ahead:]
        alive *= stays[ahead:]
        np.maximum(best[:-ahead], (1 - alive) / spent, out=best[:-ahead])
    return best.T


class Known(NamedTuple):
    """A class that was met: its row, the row of the class around it, and how many are around it."""

    row: int
    parent: int
    depth: int


Cells: TypeAlias = dict[int, complex]
"""By class and bin, as `row * NUM_BINS + bin`: two sums as one number, of moments and of how many they are, or of uses
and of seconds."""


class ReuseRates:
    """Counts by class and age, and the rates that follow from them.

    Time spent in a bin is counted without touching those who age: of each moment at which a boundary began to be in it,
    or to be no longer in it, only the sum and the number are kept. Growing older is one write.

    Attributes:
        came: moments at which a boundary took its place in a bin.
        aged: moments at which one came into a bin from the bin before it.
        left: moments at which one left a bin other than by growing older.
        uses: how many left it because they were used; and time spent there in other processes.
    """

    def __init__(self, journal: Journal, counts: Iterable[Mapping[str, Any]] = ()) -> None:
        """Without counts, or with those that `counts` gave."""
        self._journal = journal
        self.known: dict[Class, Known] = {(): Known(0, 0, 0)}
        self.around: dict[int, int] = {0: 0}
        self.came, self.aged, self.left = Cells(), Cells(), Cells()
        self.uses = Cells()
        self.table: list[list[float]] = []
        for each in counts:
            row = self.row(tuple(each["class"]))
            pairs = enumerate(zip(each["uses"], each["seconds"]))
            self.uses |= {row * NUM_BINS + at: complex(*pair) for at, pair in pairs if any(pair)}
        self.learn(0.0)

    def row(self, wanted: Class) -> int:
        """The row of a class, which is known from now on."""
        known = self.known.get(wanted)
        if known is None:
            parent = self.row(wanted[:-1])
            known = Known(len(self.known), parent, len(wanted))
            self._journal.put(self.known, wanted, known)
            self._journal.put(self.around, known.row, parent)
        return known.row

    def rate(self, row: int, age_bin: int) -> float:
        """Uses a second, as of the last `learn`; of a class that is younger, as the class around it has them."""
        while row >= len(self.table):
            row = self.around[row]
        return self.table[row][age_bin]

    def enter(self, row: int, age_bin: int, at: float) -> None:
        """A boundary takes its place in a bin."""
        self._note(self.came, row * NUM_BINS + age_bin, at)

    def age(self, row: int, age_bin: int, at: float) -> float:
        """A boundary comes into a bin from the bin before it; its rate there."""
        cell = row * NUM_BINS + age_bin
        self._journal.put(self.aged, cell, self.aged.get(cell, 0j) + complex(at, 1))
        return self.rate(row, age_bin)

    def leave(self, row: int, age_bin: int, at: float, *, used: bool = False) -> None:
        """A boundary leaves a bin, because it was used or for another reason."""
        self._note(self.left, row * NUM_BINS + age_bin, at)
        if used:
            cell = row * NUM_BINS + age_bin
            self._journal.put(self.uses, cell, self.uses.get(cell, 0j) + 1)

    def learn(self, now: float) -> None:
        """Rates as all that was counted until now has them."""
        parents = np.array([each.parent for each in self.known.values()])
        depths = np.array([each.depth for each in self.known.values()])
        uses, seconds = self._own(now)
        for depth in range(int(depths.max()), 0, -1):
            inner = np.flatnonzero(depths == depth)
            for counts in (uses, seconds):
                np.add.at(counts, parents[inner], counts[inner])
        self._journal.set(self, "table", best_rates(hazards(uses, seconds, parents, depths)).tolist())

    def counts(self, now: float) -> list[dict[str, Any]]:
        """Uses and seconds by age until now, of the members of each class that are in no class inside it."""
        own = zip(self.known, *self._own(now))
        return [
            {"class": list(name), "uses": uses.tolist(), "seconds": seconds.tolist()}
            for name, uses, seconds in own
        ]

    def _own(self, now: float) -> Table:
        """The same, `[2, classes, bins]`."""
        counts = np.zeros((2, len(self.known), NUM_BINS))
        uses, seconds = counts.reshape(2, -1)
        at, sums = _arrays(self.uses)
        uses[at], seconds[at] = sums.real, sums.imag
        came, aged, left = _arrays(self.came), _arrays(self.aged), _arrays(self.left)
        for (at, moments), sign, shift in ((came, 1, 0), (aged, 1, 0), (aged, -1, -1), (left, -1, 0)):
            seconds[at + shift] += sign * (moments.imag * now - moments.real)
        return np.maximum(counts, 0.0)

    def _note(self, moments: Cells, cell: int, at: float) -> None:
        self._journal.put(moments, cell, moments.get(cell, 0j) + complex(at, 1))


def _arrays(cells: Cells) -> tuple[NDArray[np.int64], NDArray[np.complex128]]:
    """Which cells there are, and what is in them."""
    return np.fromiter(cells, np.int64, len(cells)), np.fromiter(cells.values(), np.complex128, len(cells))
