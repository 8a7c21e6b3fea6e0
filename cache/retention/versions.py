"""Immutable versions of a structure that is changed in place.

One version is laid out in the structure; of every other, the journal knows the writes that lead to it from its
neighbour. So the newest version costs what a mutable structure costs, every older one stays what it was, and what
nobody refers to any more is forgotten by the garbage collector.

Source: Baker, "Shallow binding makes functional arrays fast", 1991.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Write: TypeAlias = tuple[Any, Any, Any, bool]
"""Target, key, value, and whether the key is an attribute of the target rather than an item in it."""
_ABSENT = object()


class Version:
    """One version. Apart from the one that is laid out, it has a neighbour nearer to that, and the writes that turn the
    neighbour's layout into its own, last one first. Or it is still to be made of another."""

    __slots__ = ("dropped", "made_of", "nearer", "writes")

    def __init__(self, made_of: tuple[Version, bytes] | None = None) -> None:
        self.made_of = made_of
        """A version, and what is held in this one beside it: whoever lays this one out makes it first."""
        self.nearer: Version | None = None
        self.writes: list[Write] = []
        self.dropped: tuple[object, Version] | None = None
        """An event and the version that it led to, where that was asked for."""


class Journal:
    """All writes to a structure go through it.

    Attributes:
        current: the version that is laid out.
        undo: what takes back the writes since, in order. Who writes often may note here what was there, and write.
    """

    def __init__(self) -> None:
        self.current = Version()
        self.undo: list[Write] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Writes an attribute."""
        self.undo.append((target, name, getattr(target, name), True))
        setattr(target, name, value)

    def put(self, target: dict[Any, Any], key: Any, value: Any) -> None:
        """Writes an item of a dict."""
        self.undo.append((target, key, target.get(key, _ABSENT), False))
        target[key] = value

    def remove(self, target: dict[Any, Any], key: Any) -> None:
        """Takes an item from a dict."""
        self.undo.append((target, key, target[key], False))
        del target[key]

    def change(self, version: Version, act: Callable[[], None], new: Version | None = None) -> Version:
        """The version that an act makes of the one that is laid out.

        Args:
            version: the one that is laid out.
            act: changes the structure through this journal. If it raises, nothing has changed.
            new: what the act makes, if that is there and waits to be made.
        """
        try:
            act()
        except BaseException:
            _play(self.undo)
            self.undo = []
            raise
        new = new or Version()
        version.nearer, version.writes = new, self.undo
        self.current, self.undo = new, []
        return new

    def lay_out(self, version: Version) -> list[Write]:
        """Lays a version out; returns what would take back the writes that were made for it."""
        path: list[Version] = []
        while version is not self.current:
            path.append(version)
            assert version.nearer is not None
            version = version.nearer
        written: list[Write] = []
        for version in reversed(path):
            farther = self.current
            farther.nearer, farther.writes = version, _play(version.writes)
            written += farther.writes
            version.nearer, version.writes = None, []
            self.current = version
        return written


def _play(writes: list[Write]) -> list[Write]:
    """Applies writes, the last one first, and returns those that take them back."""
    back: list[Write] = []
    for target, key, value, is_attribute in reversed(writes):
        if is_attribute:
            back.append((target, key, getattr(target, key), True))
            setattr(target, key, value)
            continue
        back.append((target, key, target.get(key, _ABSENT), False))
        if value is _ABSENT:
            del target[key]
        else:
            target[key] = value
    return back
