"""What the learned policy changes in place: boundaries age, are used, and teach the rates of their classes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cache.retention.ages import Ages
from cache.retention.forest import Forest, Remembered
from cache.retention.guesses import Guesses
from cache.retention.protocol import Boundary, Kind
from cache.retention.rates import Class, ReuseRates
from cache.retention.versions import Journal, Version

ENDS = (Kind.PROMPT_END, Kind.GENERATION_END)
BEFORE_END = (64, 128, 256, 512, 1024, 2048)
"""Distances before a prompt's end at which checkpoints may be made, once prompts were seen to part there."""
PARTS_OFTEN = 1 / 32
"""A distance is worth trying if prompts part there this often for each one that goes on from a prompt's end."""
SEEN_ONCE_IN = 8
"""Before anything is seen, prompts are believed to have parted once at each distance, of so many that went on."""
LEARNS_EVERY = 64
"""Requests between two looks at what was counted; fewer while there were few requests altogether."""
LASTING = ("since", "step", "request", "ahead", "uses", "left")
"""What a boundary went through, which its place in the tree does not tell."""


class Learning:
    """What all versions of a learned policy share.

    Attributes:
        journal: all writes to `forest`, `rates` and the counts here go through it.
        parted: how many prompts parted from another one, by the distance before that one's end.
        went_on: how many went on from an end.
        requests: how many came.
        learns_at: the request at which rates are learned anew.
        clock: time of the last event.
        guesses: of what held boundaries are worth.
        ages: guesses of when boundaries come into their next bin of age.
    """

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
        self.guesses = Guesses(self.forest.members)
        self.ages = Ages()

    def change(
        self, version: Version, act: Callable[[Learning], None], new: Version | None = None
    ) -> Version:
        """The version after an act."""
        with self.lock:
            self.lay_out(version)
            try:
                new = self.journal.change(version, lambda: self.settled(act), new)
            except BaseException:
                self.forest.pending.clear()
                self.ages.rebuild(self.forest.members.values())
                raise
            finally:
                self.guesses.doubtful |= self.forest.changed
                self.forest.changed.clear()
            if len(self.guesses.doubtful) > len(self.forest.members):  # some are forgotten: nobody asked
                self.guesses.settle()
            return new

    def holding(self, version: Version, key: bytes) -> Version:
        """The version in which a boundary is held, too. It is made when it is asked for more than its first victim."""
        with self.lock:
            self.lay_out(version)
            return Version((version, self.forest.members[key].key))

    def settled(self, act: Callable[[Learning], None]) -> None:
        """An act, after which servers have earned what they serve. Whose worth may be another is written anew, so that
        who goes back or forth over this change finds it touched."""
        act(self)
        self.forest.pay()
        for member, written in self.forest.changed.items():
            if not written:
                self.journal.set(member, "earned", member.earned)

    def lay_out(self, version: Version) -> None:
        """Makes a version the one that is read and written."""
        if version is self.journal.current:
            return
        if version.made_of is not None:
            before, key = version.made_of
            self.change(before, lambda core: core.hold(key), version)
            version.made_of = None
            return
        aged: dict[Remembered, None] = {}
        for target, name, _, _ in self.journal.lay_out(version):
            if name == "earned":
                self.guesses.doubtful[target] = None
            elif name == "stage" or name == "since":
                aged[target] = None
        for member in aged:
            self.ages.note(member)

    def least(self, version: Version) -> bytes | None:
        """The held boundary that is worth least in a version."""
        with self.lock:
            if version.made_of is not None:
                before, key = version.made_of
                self.lay_out(before)
                if self.would_go(self.forest.members[key]):
                    return key
            self.lay_out(version)
            return self.guesses.first()

    def would_go(self, new: Remembered) -> bool:
        """Whether a boundary, if it were held, would be worth less than all others. False may be wrong."""
        first, trial = self.guesses.first(), self.forest.trial(new)
        its = next(trial)
        if first is not None and its > (self.forest.members[first].worth, first):
            return False
        return all(its < other for other in trial)

    def hold(self, key: bytes) -> None:
        """A boundary's bytes are there."""
        self.forest.hold(self.forest.members[key])

    def made(self, boundary: Boundary, now: float) -> None:
        """Remembers a boundary."""
        self.advance(now)
        member = self.forest.add(boundary, self.clock)
        member.request = self.requests
        behind = [self.forest.members[key] for key in boundary.children]
        if boundary.kind is Kind.BRANCH:  # the parting prompt's own boundaries say nothing
            behind = [each for each in behind if each.request < self.requests]
        ends = [each.tokens + each.ahead for each in behind if each.ahead or each.kind == Kind.PROMPT_END]
        if ends and boundary.kind is not Kind.PROMPT_END:
            member.ahead = min(ends) - member.tokens
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
        self.ages.note(member)

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

    def advance(self, now: float) -> None:
        """Lets all boundaries age until now."""
        if now <= self.clock:
            return
        self.journal.set(self, "clock", now)
        for member, age_bin, at in self.ages.advance(now):
            self.forest.settle(member, (age_bin, self.rates.age(member.row, age_bin, at)))

    def part(self, ahead: int) -> None:
        """A prompt parted from another one `ahead` tokens before that one's end."""
        distance = next((each for each in BEFORE_END if 0 < ahead <= each), None)
        if distance is not None:
            self.journal.put(self.parted, distance, self.parted.get(distance, 0) + 1)

    def distances(self) -> tuple[int, ...]:
        """The distances before a prompt's end where prompts part often."""
        least = PARTS_OFTEN * (self.went_on + SEEN_ONCE_IN)
        return tuple(each for each in BEFORE_END if self.parted.get(each, 0) + 1 >= least)

    def learned(self) -> dict[str, Any]:
        """All that does not name a boundary."""
        parted = {str(at): count for at, count in sorted(self.parted.items())}
        return {"rates": self.rates.counts(self.clock), "parted": parted, "went_on": self.went_on}

    def saved(self) -> dict[str, Any]:
        """All that there is to know, with times as they are here."""
        remembered = {
            key.hex(): [member.stage, *(getattr(member, name) for name in LASTING)]
            for key, member in self.forest.members.items()
        }
        numbers = {"clock": self.clock, "requests": self.requests, "learns_at": self.learns_at}
        return {**self.learned(), **numbers, "table": self.rates.table, "remembered": remembered}

    def restore(
        self, saved: Mapping[str, Any], boundaries: Sequence[Boundary], held: Sequence[bytes], later: float
    ) -> None:
        """Takes up what was saved, in a structure that begins with what was learned."""
        journal, remembered = self.journal, saved["remembered"]
        for name in ("requests", "learns_at"):
            journal.set(self, name, saved[name])
        journal.set(self.rates, "table", saved["table"])
        journal.set(self, "clock", saved["clock"] + later)
        for boundary in boundaries:
            member = self.forest.add(boundary, self.clock)
            (age_bin, rate), *values = remembered[boundary.key.hex()]
            for name, value in zip(LASTING, values):
                journal.set(member, name, value)
            journal.set(member, "since", member.since + later)
            journal.set(member, "row", self.rates.row(traits(member)))
            self.rates.enter(member.row, age_bin, self.clock)
            self.forest.settle(member, (age_bin, rate))
        self.ages.rebuild(self.forest.members.values())
        self.forest.pay()
        for key in held:
            self.hold(key)


def traits(member: Remembered) -> Class:
    """What a boundary has in common with others, the most telling first.

    Why it was made; whether its conversation went on; the prompts before it on its path, how often it was used and how
    many tokens it lies behind the boundary before it, each as a power of two or up to a small number.
    """
    uses, step = min(member.uses.bit_length(), 5), min((member.step // 512).bit_length(), 6)
    return member.kind, int(member.left), min(member.turn, 3), uses, step
