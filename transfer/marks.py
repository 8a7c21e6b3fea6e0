"""Marks: tiny objects that say where along a prompt there are checkpoints.

A checkpoint's key is a digest of all tokens before its boundary, so that a reader can ask about a boundary of its own
prompt only, and cannot ask which boundaries there are. So whoever stores a checkpoint with boundary t also stores two
marks, one a step of the ladder. The mark of step s lies at the last multiple p of s at or below t, has p's key with the
step in front, and lists the boundaries that its writer knows of, up to t.

What a mark says, and what it does not:

- Its key is p's, so that the reader shares the writer's first p tokens: listed boundaries at or below p lie on the
  reader's prompt too. Those above may be of a sibling that left the prompt in between.
- No mark of step s at p: no checkpoint of this prompt in [p, p + s) was announced, or the mark was evicted.
- The first writer's list stays for ever, so it may lack what was stored later and name what has been evicted since.

A mark never makes a hit: it only makes a reader ask for a checkpoint by the key of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from transfer.objects import Bytes, Item, Objects, Put

Path: TypeAlias = Callable[[int], str]
"""One prompt: the key of the checkpoint behind its first `t` tokens, for any t from 0 to its length."""

T = TypeVar("T")
LISTED = 64
"""Boundaries that a mark lists at most."""


class Ladder(NamedTuple):
    """Steps between marks, in tokens. All readers and writers of a store use the same.

    Attributes:
        coarse: a multiple of `fine`.
        fine: the most boundaries that a reader has to ask for one by one.
    """

    coarse: int = 4096
    fine: int = 64

    def check(self) -> Ladder:
        """Itself.

        Raises:
            ValueError: if the steps do not fit each other.
        """
        if self.fine < 1 or self.coarse % self.fine or self.coarse < self.fine:
            raise ValueError(
                f"{self} must have coarse a multiple of fine, and both positive; the default does"
            )
        return self


LADDER = Ladder()


class Mark(NamedTuple):
    """The mark of step `step` at `position` tokens, a multiple of it."""

    step: int
    position: int

    @property
    def end(self) -> int:
        """Tokens up to the next mark of this step."""
        return self.position + self.step

    def boundaries(self, limit: int) -> range:
        """The boundaries that it may stand for, up to `limit`, deepest first."""
        return range(min(self.end - 1, limit), max(self.position, 1) - 1, -1)

    def key(self, path: Path) -> str:
        """Its key, for the prompts that share these tokens."""
        return f"mark/{self.step}/{path(self.position)}"


def announce(
    objects: Objects,
    path: Path,
    boundaries: Iterable[int],
    known: Iterable[int],
    timeout: float,
    ladder: Ladder = LADDER,
) -> list[Put]:
    """Stores the marks of checkpoints, so that `find` finds them: at most two a checkpoint, 256 bytes each.

    Call it when the checkpoints are stored, with all that one prefill has made. Marks that are there stay as they are;
    marks that were evicted come back. What fails costs later hits, nothing else.

    Args:
        boundaries: of the checkpoints, tokens, positive; with the one that the prefill resumed from, whose marks may be
            evicted before it is.
        known: other boundaries of this prompt that had a checkpoint: `Found.known`, and those announced since.
        timeout: seconds until the call has ended.

    Returns:
        How the put of each mark ended.

    Raises:
        ValueError: for a boundary that is not positive, and steps that do not fit.
    """
    marks = marks_of(boundaries, known, ladder)
    return objects.put([Item(mark.key(path), [encode(listed)]) for mark, listed in marks.items()], timeout)


def marks_of(boundaries: Iterable[int], known: Iterable[int], ladder: Ladder) -> dict[Mark, list[int]]:
    """What `announce` stores: each mark, with the boundaries that it lists, deepest first."""
    boundaries = sorted(boundaries)
    if boundaries and boundaries[0] < 1:
        raise ValueError(
            f"boundary {boundaries[0]} must be positive: there is no state before the first token"
        )
    known, marks = {at for at in known if at > 0}.union(boundaries), {}
    for boundary in boundaries:  # of several in one place, the deepest one's list stays
        listed = spread(sorted((at for at in known if at <= boundary), reverse=True), LISTED)
        for step in ladder.check():
            marks[Mark(step, boundary // step * step)] = listed
    return marks


def encode(listed: Sequence[int]) -> Bytes:
    """A list of boundaries as bytes: 64 little-endian numbers of 32 bits, zeros behind the last."""
    raw = np.zeros(LISTED, "<u4")
    raw[: len(listed)] = listed
    return raw.view(np.uint8)


def decode(raw: Bytes) -> list[int]:
    """The list that `encode` wrote; an empty one for bytes of another length."""
    if raw.nbytes != 4 * LISTED:
        return []
    return [at for at in np.frombuffer(raw.tobytes(), "<u4").tolist() if at]


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most this many of them, in order: half of them the first ones, half evenly from the rest."""
    if len(items) <= most:
        return list(items)
    first = most - most // 2
    step = (len(items) - first) / max(most - first, 1)
    return [*items[:first], *(items[first + int(i * step)] for i in range(most - first))]
