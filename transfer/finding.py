"""Where a prompt can resume: the deepest checkpoint of it that a store holds, in three calls.

1. `get` of the coarse marks at or below the limit. They list boundaries.
2. `get` of the fine marks under those that are there, deepest first, and of one byte of a few listed checkpoints.
3. `contains` of checkpoints: what is listed and may be deeper, and every boundary under the deepest fine marks.

**Never wrong.** What is returned was there when it was asked for, under the key of the prompt's own tokens. Marks that
are stale, damaged or of siblings cost probes, nothing else.

**When it is the deepest.** A checkpoint is found if a coarse mark lists it, or if both of its marks are held and the
probes last down to it. Siblings that left the prompt above it use them up, however many left in one place: a coarse
mark of theirs costs a coarse step's fine marks, a fine one costs its boundaries. `Found.complete` says that the probes
did last: no checkpoint of this prompt with both marks lies above the first of `Found.boundaries`.

**When it may not be.** Listed nowhere, and its marks evicted, or under more siblings' marks than that, or under a
listed checkpoint that is gone. Listed, and under many that are gone. Then a shallower one is found, or none, until a
prefill that passes announces again.

**What stays in the store.** Many stores keep for a while what they were asked about, and what belongs to it. Marks
belong to nothing. Of the checkpoints that are there, those above every listed one are all asked about; of the others
`EARLY + LATER` at most, or `EARLY + 4 * LATER` where the first few are gone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from time import monotonic
from typing import NamedTuple

from transfer.calls import deadline
from transfer.marks import LADDER, Ladder, Mark, Path, decode, spread
from transfer.objects import Objects, Read

PROBES = 500
EARLY = 4
"""Listed checkpoints that the second call asks about."""
LATER = 16
"""Listed checkpoints that the third call asks about, four times as many if all of the second call's are gone."""
GUESSES = 32
"""Boundaries that a sibling may have listed, to ask about after each fine mark's own."""


class Question(NamedTuple):
    """What one call asks: what marks list, and of which boundaries the prompt's checkpoint is there."""

    marks: Sequence[Mark] = ()
    boundaries: Sequence[int] = ()


class Answer(NamedTuple):
    """By mark, what it lists, or None if it is not there; by boundary, whether the checkpoint is there."""

    lists: Sequence[list[int] | None] = ()
    there: Sequence[bool] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ended with.

    Attributes:
        boundaries: whose checkpoints were there, deepest first; not all there are.
        complete: if the store answered, no checkpoint of the prompt that has its marks is above the first of these, or
            anywhere if there is none.
        known: boundaries of the prompt that have or had a checkpoint and were not seen to be gone, deepest first.
        gone: boundaries whose checkpoints were asked about and were not there, deepest first.
        rounds: calls.
        probes: keys that were asked about.
    """

    boundaries: tuple[int, ...] = ()
    complete: bool = True
    known: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    rounds: int = 0
    probes: int = 0


def find(
    objects: Objects,
    path: Path,
    limit: int,
    timeout: float,
    probes: int = PROBES,
    ladder: Ladder = LADDER,
) -> Found:
    """Finds checkpoints that a prompt can resume from, in at most three calls.

    Args:
        path: the prompt's keys; called once a probe.
        limit: the deepest boundary to look for, tokens: below the prompt's length, since one token has to be computed.
        timeout: seconds until the last call has ended. If it passes, nothing is found.
        probes: most keys to ask about. 500 do for 2^20 tokens; beyond, each coarse step takes one more.
        ladder: the one that `announce` was given.

    Raises:
        ValueError: for a timeout that is not positive, fewer probes than three calls need, and steps that do not fit.
    """
    until, rounds, asked = deadline(timeout), 0, 0
    steps = search(limit, probes, ladder)
    try:
        question = next(steps)
        while (left := until - monotonic()) > 0:
            answer = _ask(objects, path, question, left)
            rounds, asked = rounds + 1, asked + len(answer.lists) + len(answer.there)
            question = steps.send(answer)
    except StopIteration as end:
        return replace(end.value, rounds=rounds, probes=asked)
    return Found(complete=False, rounds=rounds, probes=asked)


def search(limit: int, probes: int, ladder: Ladder) -> Generator[Question, Answer, Found]:
    """The questions, each from the answers before it, and what follows from the last. Asks no store itself."""
    coarse, fine = ladder.check()
    last = 2 * (fine + EARLY + LATER)
    if probes <= last:
        raise ValueError(f"{probes=} must be more than {last}, what two calls behind the first may need")
    seen = _Seen(limit)
    if limit < 1:
        return seen.found()
    tops = seen.cut(_marks(coarse, 0, limit), probes - last)
    full = seen.read(tops, (yield Question(tops)).lists)
    if not full:
        return seen.found()

    left, early = probes - len(tops), spread(seen.listed(), EARLY)
    most, deepest = left // 2 - len(early), max(early, default=0)
    lower = (_marks(fine, top.position, min(top.end - 1, limit)) for top in full)
    blocks = list(islice(chain.from_iterable(lower), most + 1))
    blocks = seen.cut(blocks, min(most, sum(mark.end > deepest for mark in blocks)))
    answer = yield Question(blocks, early)
    crowds = [mark.boundaries(limit) for mark in seen.read(blocks, answer.lists)]
    seen.test(early, answer.there)

    tests = seen.candidates(crowds)[: left - len(blocks) - len(early)]
    if tests:
        seen.test(tests, (yield Question(boundaries=tests)).there)
    return seen.found(crowds)


@dataclass(slots=True)
class _Seen:
    """What the answers so far say of a prompt.

    Attributes:
        limit: the deepest boundary of interest.
        sure: listed boundaries that lie on the prompt.
        guessed: listed boundaries of the prompt or of a sibling.
        tested: boundaries that were asked about, and whether the checkpoint is there.
        cut_off: the deepest boundary whose marks were not asked for.
    """

    limit: int
    sure: set[int] = field(default_factory=set)
    guessed: set[int] = field(default_factory=set)
    tested: dict[int, bool] = field(default_factory=dict)
    cut_off: int = 0

    @property
    def hit(self) -> int:
        """The deepest checkpoint that is there; 0 for none."""
        return max((at for at, there in self.tested.items() if there), default=0)

    def cut(self, marks: list[Mark], most: int) -> list[Mark]:
        """The first of them."""
        if len(marks) > most:
            self.cut_off = max(self.cut_off, min(marks[most].end - 1, self.limit))
        return marks[:most]

    def read(self, marks: Sequence[Mark], lists: Sequence[list[int] | None]) -> list[Mark]:
        """Takes in what marks list; those that are there."""
        for mark, listed in zip(marks, lists):
            for at in listed or ():
                if at <= self.limit:
                    (self.sure if at <= mark.position else self.guessed).add(at)
        return [mark for mark, listed in zip(marks, lists) if listed is not None]

    def test(self, boundaries: Sequence[int], there: Sequence[bool]) -> None:
        """Takes in which checkpoints are there."""
        self.tested.update(zip(boundaries, there))

    def listed(self) -> list[int]:
        """Boundaries of the prompt that were not seen to be gone, deepest first."""
        return sorted((at for at in self.sure if self.tested.get(at, True)), reverse=True)

    def candidates(self, crowds: Sequence[range]) -> list[int]:
        """Boundaries to ask about, the most promising first: `crowds` are those that each fine mark may stand for.

        Below the deepest that is listed for sure, only a few, for the case that it is gone.
        """
        firsts = {crowd[-1] for crowd in crowds}  # where a fine mark lies, the place of checkpoints on a grid
        hit = self.hit
        named = [at for at in sorted(self.sure | self.guessed | firsts, reverse=True) if at > hit]
        deepest = max([hit, *(at for at in self.sure if at not in self.tested)])
        higher = [at for at in named if at > deepest]
        one_by_one = [[at for at in crowd if at > deepest] for crowd in crowds]
        lower = [at for at in named if at <= deepest and at not in self.tested]
        order = spread(lower, LATER)
        for i, crowd in enumerate(one_by_one or [[]]):
            order += crowd + higher[i * GUESSES : (i + 1) * GUESSES]
            if not i and not hit:  # what is gone costs nothing to ask about, and much is gone
                order += spread(lower, 4 * LATER)
        order += higher
        return [at for at in dict.fromkeys(order) if at not in self.tested]

    def found(self, crowds: Sequence[range] = ()) -> Found:
        """What it comes to."""
        untested = (at for crowd in crowds for at in crowd if at not in self.tested)  # deepest first
        missed = max(next(untested, 0), self.cut_off)
        hits = {at for at, there in self.tested.items() if there}
        return Found(
            boundaries=tuple(sorted(hits, reverse=True)),
            complete=missed <= self.hit,
            known=tuple(sorted(hits.union(self.listed()), reverse=True)),
            gone=tuple(sorted(self.tested.keys() - hits, reverse=True)),
        )


def _marks(step: int, low: int, high: int) -> list[Mark]:
    """The marks from `low`, a multiple of `step`, to `high`, deepest first."""
    return [Mark(step, at) for at in range(high // step * step, low - 1, -step)]


def _ask(objects: Objects, path: Path, question: Question, timeout: float) -> Answer:
    """Puts a question to a store, in one call."""
    marks, boundaries = question
    if not marks:
        return Answer(there=objects.contains([path(at) for at in boundaries], timeout))
    reads = [Read(mark.key(path)) for mark in marks] + [Read(path(at), 0, 1) for at in boundaries]
    found = objects.get(reads, timeout)
    lists = [None if raw is None else decode(raw) for raw in found[: len(marks)]]
    return Answer(lists, [raw is not None for raw in found[len(marks) :]])
