"""Drafts by prompt lookup: what came after the same tokens before is what may come after them now.

A function of one request's own tokens, without a model: it costs nothing where a text does not repeat itself, and finds
what an answer copies from its prompt, or from itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from cache.tokens import Tokens

PARTS = 64
"""Dictionaries that the runs lie in, by their last token: a large one that grows holds a step up for 30 ms."""


@runtime_checkable
class Drafter(Protocol):
    """Guesses how a request goes on."""

    @property
    def count(self) -> int:
        """Tokens that it has read."""
        ...

    def read(self, tokens: Tokens, most: int) -> None:
        """Takes in up to `most` tokens of `tokens`, int32 [T], behind those that it has read."""
        ...

    def propose(self, tokens: Tokens, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may come behind `tokens`, int32 [T], of which it reads what it has not yet."""
        ...


class Lookup:
    """Finds where the longest run of last tokens stood before, and proposes what followed it there.

    Each run of the shortest length knows where it stood last, and each place where its run stood before: a token costs
    one entry, and a proposal a walk over a few places, however long the text is. Of equally long runs the latest
    counts. A run of n tokens is worth n drafts: a short one is often there by chance.
    """

    def __init__(
        self,
        *,
        stop_tokens: Iterable[int] = (),
        shortest: int = 3,
        longest: int = 16,
        places: int = 16,
    ) -> None:
        """
        Args:
            stop_tokens: drafts end before them: nothing comes behind.
            shortest: tokens that a run must have.
            longest: tokens of a run that are compared, and most drafts.
            places: most places that are looked at.

        Raises:
            ValueError: numbers that are not positive, or a longest run that is shorter than the shortest.
        """
        if not 0 < shortest <= longest or places < 1:
            raise ValueError(
                f"runs of 0 < shortest <= longest tokens are looked for in a place at least, "
                f"got {shortest=}, {longest=}, {places=}"
            )
        self.stop_tokens, self.shortest, self.longest = frozenset(stop_tokens), shortest, longest
        self.places = places
        self._text: list[int] = []
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in range(PARTS)]
        self._before: list[int] = []

    @property
    def count(self) -> int:
        """As `Drafter.count`."""
        return len(self._text)

    def read(self, tokens: Tokens, most: int) -> None:
        """As `Drafter.read`. A place is the index behind a run; 0 stands for none."""
        for token in tokens[self.count : self.count + most].tolist():
            self._text.append(token)
            run = tuple(self._text[-self.shortest :])  # the first ones are shorter, and never seen again
            last = self._last[token % PARTS]
            self._before.append(last.get(run, 0))
            last[run] = len(self._text)

    def propose(self, tokens: Tokens, most: int) -> tuple[int, ...]:
        """As `Drafter.propose`. A run that stood right before goes on in a circle."""
        self.read(tokens, len(tokens))
        end, length = self._longest_run()
        drafts: list[int] = []
        for i in range(min(most, length)):
            token = self._text[end + i % (len(self._text) - end)]
            if token in self.stop_tokens:
                break
            drafts.append(token)
        return tuple(drafts)

    def _longest_run(self) -> tuple[int, int]:
        """The place of the longest run of last tokens that stood before, and its length; 0 and 0 for none."""
        end, best = self._before[-1] if self._before else 0, (0, 0)
        for _ in range(self.places):
            if end == 0:
                break
            length = self._common(end)
            if length > best[1]:
                best = end, length
            if length == self.longest:
                break
            end = self._before[end - 1]
        return best

    def _common(self, end: int) -> int:
        """How many tokens before `end` are those at the end of the text, up to `longest`."""
        length = 0
        while length < min(self.longest, end) and self._text[end - 1 - length] == self._text[-1 - length]:
            length += 1
        return length
