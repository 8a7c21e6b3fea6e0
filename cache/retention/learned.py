"""The default policy: what to keep is learned from how boundaries were used, with nothing to tune."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from cache.retention.learning import Learning
from cache.retention.protocol import Boundary, Creation, Kind
from cache.retention.versions import Version

KINDS = frozenset(
    {Kind.PROMPT_END, Kind.GENERATION_END, Kind.BRANCH, Kind.MISSING, Kind.MARK, Kind.BEFORE_END}
)


class Learned:
    """A `Policy`. An immutable value: its versions share one structure, which is laid out for the newest.

    Each boundary that was ever made stays remembered, held or not, and the next request that comes to it tells how long
    its kind takes to be used again. A held checkpoint is worth the rates of all remembered boundaries that it serves,
    times the tokens that it saves over the next held one below it, for each byte freed by dropping it. So an end of a
    prompt that a conversation has left behind is given up first, a branch point that many pass is kept, and a large
    prompt has to be worth its size, with no rule for any of these.

    Ages advance when a request comes: what `worth` and `victims` say is as of the last `used`.
    """

    __slots__ = ("_core", "_start", "_version")

    def __init__(self, learned: Mapping[str, Any] | None = None) -> None:
        """An empty policy.

        Args:
            learned: what `learned` gave in another process: rates survive a restart, boundaries are made anew.
        """
        self._start: Mapping[str, Any] | None = learned or {}
        self._core = Learning(self._start)
        self._version = self._core.journal.current

    @property
    def creation(self) -> Creation:
        """Prompt ends, branch points, what is missing, marks, and distances before the end where prompts part."""
        with self._laid_out() as core:
            return _creation(core.distances())

    def made(self, boundary: Boundary, now: float) -> Learned:
        """A boundary is remembered from now on."""
        return self._next(lambda core: core.made(boundary, now))

    def held(self, key: bytes, now: float) -> Learned:
        """Its bytes are there."""
        if self._start is not None:
            return self._next(lambda core: core.hold(key))
        return self._at(self._core.holding(self._version, key))

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
            key = value._core.least(value._version)
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

    def expected(self, key: bytes) -> float:
        """Uses a second that a held boundary will serve, its own and those of boundaries behind it (`Expects`).

        Raises:
            KeyError: if it is not held.
        """
        with self._laid_out() as core:
            member = core.forest.members[key]
            if not member.held:
                raise KeyError(key)
            return max(0.0, member.earned)

    def learned(self) -> dict[str, Any]:
        """What was learned so far, in numbers, strings, lists and dicts: to be written down for the next start."""
        with self._laid_out() as core:
            return core.learned()

    def saved(self) -> dict[str, Any]:
        """What was learned, and what is known of each remembered boundary (`Lasting`)."""
        with self._laid_out() as core:
            return core.saved()

    def restored(
        self, saved: Mapping[str, Any], boundaries: Sequence[Boundary], held: Sequence[bytes], later: float
    ) -> Learned:
        """What was saved, of these boundaries (`Lasting`)."""
        return Learned(saved)._next(lambda core: core.restore(saved, boundaries, held, later))

    def _laid_out(self) -> _LaidOut:
        return _LaidOut(self._core, self._version)

    def _at(self, version: Version) -> Learned:
        other = object.__new__(Learned)
        other._core, other._version, other._start = self._core, version, None
        return other

    def _next(self, act: Callable[[Learning], None]) -> Learned:
        if self._start is None:
            return self._at(self._core.change(self._version, act))
        # a structure of its own for whoever begins with this value: each tier of a store does
        own = Learned(self._start)
        return own._at(own._core.change(own._version, act))


@lru_cache
def _creation(before_end: tuple[int, ...]) -> Creation:
    return Creation(kinds=KINDS, before_end=before_end)


class _LaidOut:
    """Holds the structure in one version while it is read."""

    def __init__(self, core: Learning, version: Version) -> None:
        self.core, self.version = core, version

    def __enter__(self) -> Learning:
        self.core.lock.acquire()
        self.core.lay_out(self.version)
        return self.core

    def __exit__(self, *_: object) -> None:
        self.core.lock.release()
