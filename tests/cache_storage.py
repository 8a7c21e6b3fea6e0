"""Storage with the faults that storage has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cache.keys import KeyChain
from cache.tier import Tier
from cache.tiers import InMemory
from cache.view import Rows, Seen, View


class Faulty(InMemory):
    """Cannot read some of its objects again, and can be full."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()
        self.full = False

    def write(self, name: str, payload: Any) -> Any:
        if self.full:
            raise OSError("no space left")
        self.broken.discard(name)
        return payload

    def read(self, name: str, kept: Any) -> Any:
        if name in self.broken:
            raise ValueError("checksum")
        return super().read(name, kept)


class Remote:
    """A store elsewhere, which gives up any object at any time."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def write(self, name: str, payload: Any) -> Any:
        return self.objects.setdefault(name, payload)

    def read(self, name: str, kept: Any) -> Any:
        if name not in self.objects:
            raise OSError("not found")
        return self.objects[name]

    def look(self, chains: Sequence[KeyChain], page: int) -> View:
        """What it has of a prompt, by the chains of its beginnings."""
        rows = [
            Rows(at * page, (at + 1) * page, Tier.REMOTE.bit)
            for at, name in enumerate(chains[-1].added)
            if f"page/{name.hex()}" in self.objects
        ]
        found = [Seen(c.length, Tier.REMOTE.bit) for c in chains if f"state/{c.key.hex()}" in self.objects]
        ends = [*(each.stop for each in rows), *(each.boundary for each in found)]
        return View(max(ends, default=0), tuple(rows), tuple(found))
