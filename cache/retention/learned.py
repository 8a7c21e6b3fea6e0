"""The default policy: what to keep is learned from how boundaries were used, with nothing to tune."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cache.retention.forest import Forest, Remembered
from cache.retention.protocol import Boundary, Creation, Kind
from cache.retention.rates import EDGES, NUM_BINS, Class, ReuseRates
from cache.retention.versions import Journal, Version

KINDS = frozenset(
    {Kind.PROMPT_END, Kind.GENERATION_END, Kind.BRANCH, Kind.MISSING, Kind.MARK, Kind.BEFORE_END}
)
ENDS = (Kind.PROMPT_END, Kind.GENERATION_END)
BEFORE_END = (64, 128, 256, 512, 1024, 2048)
"""Distances before a prompt's end at which checkpoints may be made, once prompts were seen to part there."""
PARTS_OFTEN = 1 / 32
"""A distance is worth trying if prompts part there this often for each one that goes on from a prompt's end. Before
anything is seen, each is believed to have been met once, in this many."""
_SEEN_ONCE_IN = 8
LEARNS_EVERY = 64
"""Requests between two looks at what was counted; fewer while there were few requests altogether."""


class Learned:
    """A `Policy`. An immutable value: its versions share one structure, which is laid out for the newest.

    Each boundary that was ever made stays remembered, held or not, and the next request that comes to it tells how long
    its kind takes to be used again. A held checkpoint is worth the rates of all remembered boundaries that it serves,
    times the tokens that it saves over the next held one below it, for each byte freed by dropping it. So an end of a
    prompt that a conversation has left behind is given up first, a branch point that many pass is kept, and a large
    prompt has to be worth its size, with no rule for any of these.

    Ages advance when a request comes: what `worth` and `victims` say is as of the last `used`.
    """

    __slots__ = ("_core", "_version")

    def __init__(self, learned: Mapping[str, Any] | None = None) -> None:
        """An empty policy.

        Args:
            learned: what `learned` gave in another process: rates survive a restart, boundaries are made anew.
        """
        self._core = _Core(learned or {})
        self._version = self._core.journal.current

    @property
    def creation(self) -> Creation:
        """Prompt ends, branch points, what is missing, marks, and distances before the end where prompts part."""
        with self._laid_out() as core:
            return Creation(kinds=KINDS, before_end=core.distances())

    def made(self, boundary: Boundary, now: float) -> Learned:
        """A boundary is remembered from now on."""
        return self._next(lambda core: core.made(boundary, now))

    def held(self, key: bytes, now: float) -> Learned:
        """Its bytes are there."""
        return self._next(lambda core: core.forest.hold(core.forest.members[key]))

    def used(self, path: Sequence[bytes], hit: bytes | None, now: float) -> Learned:
        """A request came; the deepest boundary on its path is the one that it used, held or not."""
        return self._next(lambda core: core.used(path, now))

    def dropped(self, key: bytes, now: float) -> Learned:
        """Its bytes are gone."""
        before = self._version.dropped
        if before is None or before[0] != key:
            after = self._next(lambda core: core.forest.drop(core.forest.members[key]))
            before = self._version.dropped = key, after._version
        return self._at(before[1])

    def forgotten(self, key: bytes) -> Learned:
        """It is no longer remembered."""
        return self._next(lambda core: core.forgotten(key))

    def victims(self, nbytes: int, now: float) -> Iterator[bytes]:
        """Held boundaries, the least worth first, each as if those before it were dropped."""
        value = self
        while True:
            with value._laid_out() as core:
                key = core.least()
            if key is None:
                return
            yield key
            value = value.dropped(key, now)

    def worth(self, key: bytes, now: float) -> float:
        """Tokens that holding a boundary saves, a second and a byte freed by dropping it.

        Raises:
            KeyError: if it is not held.
        """
        with self._laid_out() as core:
            member = core.forest.members[key]
            if not member.held:
                raise KeyError(key)
            return member.worth

    def learned(self) -> dict[str, Any]:
        """What was learned so far, in numbers, strings, lists and dicts: to be written down for the next start."""
        with self._laid_out() as core:
            return core.learned()

    def _laid_out(self) -> _LaidOut:
        return _LaidOut(self._core, self._version)

    def _at(self, version: Version) -> Learned:
        other = object.__new__(Learned)
        other._core, other._version = self._core, version
        return other

    def _next(self, act: Callable[[_Core], None]) -> Learned:
        return self._at(self._core.change(self._version, act))


class _LaidOut:
    """Holds the structure in one version while it is read."""

    def __init__(self, core: _Core, version: Version) -> None:
        self.core, self.version = core, version

    def __enter__(self) -> _Core:
        self.core.lock.acquire()
        self.core.lay_out(self.version)
        return self.core

    def __exit__(self, *_: object) -> None:
        self.core.lock.release()


class _Core:
    """What all versions share. `by_worth` and `by_due` are no part of a version: they hold guesses, each looked up
    before it is believed, and whatever a version changes is guessed anew."""

    def __init__(self, learned: Mapping[str, Any]) -> None:
        self.lock = threading.RLock()
        self.journal = Journal()
        self.forest = Forest(self.journal)
        self.rates = ReuseRates(self.journal, learned.get("rates", ()))
        self.parted: dict[int, int] = {int(at): count for at, count in learned.get("parted", {}).items()}
        self.went_on = int(learned.get("went_on", 0))
        self.requests = 0
        self.learns_at = 1
        self.clock = 0.0
        self.by_worth: list[tuple[float, bytes]] = []
        self.by_due: list[tuple[float, bytes]] = []

    def change(self, version: Version, act: Callable[[_Core], None]) -> Version:
        """The version after an act."""
        with self.lock:
            self.lay_out(version)
            try:
                new = self.journal.change(version, lambda: self.settled(act))
            except BaseException:
                self.forest.pending.clear()
                self.by_due = sorted((due(member), key) for key, member in self.forest.members.items())
                raise
            self.guess()
            return new

    def settled(self, act: Callable[[_Core], None]) -> None:
        """An act, after which servers have earned what they serve."""
        act(self)
        self.forest.pay()

    def lay_out(self, version: Version) -> None:
        """Makes a version the one that is read and written."""
        if version is self.journal.current:
            return
        for target in self.journal.lay_out(version):
            if isinstance(target, Remembered):
                self.forest.lowered.append(target)
                heapq.heappush(self.by_due, (due(target), target.key))
        self.guess()

    def guess(self) -> None:
        """Notes the worth of whatever may be worth less than was noted."""
        for member in dict.fromkeys(self.forest.lowered):
            if member.held and member.key:
                worth = member.worth
                if worth < member.hint:
                    member.hint = worth
                    heapq.heappush(self.by_worth, (worth, member.key))
        self.forest.lowered.clear()

    def least(self) -> bytes | None:
        """The held boundary that is worth least."""
        noted, members = self.by_worth, self.forest.members
        while noted:
            hint, key = noted[0]
            member = members.get(key)
            if member is None or member.hint != hint or not member.held:
                if member is not None and member.hint == hint:
                    member.hint = math.inf
                heapq.heappop(noted)
                continue
            worth = member.worth
            if worth <= hint:
                return key
            member.hint = worth
            heapq.heapreplace(noted, (worth, key))
        return None

    def made(self, boundary: Boundary, now: float) -> None:
        """Remembers a boundary."""
        self.advance(now)
        member = self.forest.add(boundary, self.clock)
        member.request = self.requests
        ends = [self.forest.members[key] for key in boundary.children]
        ends = [end for end in ends if end.kind == Kind.PROMPT_END]
        if boundary.kind is Kind.BRANCH:  # the parting prompt's own end says nothing
            ends = [end for end in ends if end.request < self.requests]
        member.ahead = min((end.tokens - member.tokens for end in ends), default=0)
        if boundary.kind is Kind.BRANCH:
            self.part(member.ahead)
        self.begin(member)
        if member.kind in ENDS and member.parent.kind in ENDS and not member.parent.left:
            self.leave_behind(member.parent)

    def used(self, path: Sequence[bytes], now: float) -> None:
        """Counts a request for the deepest boundary that it passes."""
        self.advance(now)
        self.journal.set(self, "requests", self.requests + 1)
        if path:
            member = self.forest.members[path[-1]]
            if member.kind == Kind.PROMPT_END:
                self.journal.set(self, "went_on", self.went_on + 1)
            elif member.kind == Kind.BEFORE_END:
                self.part(member.ahead)
            self.rates.leave(member.row, member.stage[0], self.clock, used=True)
            self.journal.set(member, "uses", member.uses + 1)
            self.begin(member)
        if self.requests >= self.learns_at:
            self.rates.learn(self.clock)
            self.journal.set(self, "learns_at", self.requests + 1 + min(self.requests // 8, LEARNS_EVERY))

    def forgotten(self, key: bytes) -> None:
        """Forgets a boundary that is not held."""
        member = self.forest.members[key]
        if member.held:
            raise ValueError(f"{key.hex()[:16]} is held; a boundary is dropped before it is forgotten")
        self.rates.leave(member.row, member.stage[0], self.clock)
        self.forest.forget(member)

    def begin(self, member: Remembered) -> None:
        """A boundary's age begins anew."""
        self.journal.set(member, "since", self.clock)
        self.journal.set(member, "row", self.rates.row(traits(member)))
        self.rates.enter(member.row, 0, self.clock)
        self.come(member, 0)

    def leave_behind(self, end: Remembered) -> None:
        """A conversation went on from its last end."""
        age_bin = end.stage[0]
        self.rates.leave(end.row, age_bin, self.clock)
        self.journal.set(end, "left", True)
        self.journal.set(end, "row", self.rates.row(traits(end)))
        self.rates.enter(end.row, age_bin, self.clock)
        self.come(end, age_bin)

    def come(self, member: Remembered, age_bin: int) -> None:
        """A boundary is in a bin from now on, with the rate of its class there."""
        self.forest.settle(member, (age_bin, self.rates.rate(member.row, age_bin)))
        heapq.heappush(self.by_due, (due(member), member.key))

    def advance(self, now: float) -> None:
        """Lets all boundaries age until now."""
        if now <= self.clock:
            return
        self.journal.set(self, "clock", now)
        members = self.forest.members
        while self.by_due and self.by_due[0][0] <= now:
            at, key = heapq.heappop(self.by_due)
            member = members.get(key)
            if member is not None and due(member) == at:
                age_bin = member.stage[0] + 1
                self.rates.age(member.row, age_bin, at)
                self.come(member, age_bin)

    def part(self, ahead: int) -> None:
        """A prompt parted from another one `ahead` tokens before that one's end."""
        distance = next((each for each in BEFORE_END if 0 < ahead <= each), None)
        if distance is not None:
            self.journal.put(self.parted, distance, self.parted.get(distance, 0) + 1)

    def distances(self) -> tuple[int, ...]:
        """The distances before a prompt's end where prompts part often."""
        least = PARTS_OFTEN * (self.went_on + _SEEN_ONCE_IN)
        return tuple(each for each in BEFORE_END if self.parted.get(each, 0) + 1 >= least)

    def learned(self) -> dict[str, Any]:
        """All that does not name a boundary."""
        parted = {str(at): count for at, count in sorted(self.parted.items())}
        return {"rates": self.rates.counts(self.clock), "parted": parted, "went_on": self.went_on}


def due(member: Remembered) -> float:
    """When a boundary comes into its next bin of age, if it is not used before."""
    age_bin = member.stage[0] + 1
    return member.since + EDGES[age_bin] if age_bin < NUM_BINS else math.inf


def traits(member: Remembered) -> Class:
    """What a boundary has in common with others, the most telling first.

    Why it was made; whether its conversation went on; the prompts before it on its path, how often it was used and how
    many tokens it lies behind the boundary before it, each as a power of two or up to a small number.
    """
    uses, step = min(member.uses.bit_length(), 5), min((member.step // 512).bit_length(), 6)
    return member.kind, int(member.left), min(member.turn, 3), uses, step
