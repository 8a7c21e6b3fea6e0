"""The simplest policy there is, for tests of what is around it: gives up what was used longest ago."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from immutables import Map

from cache.retention.protocol import Boundary, Creation


class OldestFirst(NamedTuple):
    """Times of last use, of what is held."""

    last_use: Map[bytes, float] = Map()
    creation: Creation = Creation()

    def made(self, boundary: Boundary, now: float) -> OldestFirst:
        return self

    def held(self, key: bytes, now: float) -> OldestFirst:
        return self._replace(last_use=self.last_use.set(key, now))

    def used(self, path: Sequence[bytes], hit: bytes | None, now: float) -> OldestFirst:
        return self.held(hit, now) if hit in self.last_use and hit is not None else self

    def dropped(self, key: bytes, now: float) -> OldestFirst:
        return self._replace(last_use=self.last_use.delete(key))

    def forgotten(self, key: bytes) -> OldestFirst:
        return self

    def victims(self, nbytes: int, now: float) -> Iterator[bytes]:
        return iter(sorted(self.last_use, key=lambda key: (self.last_use[key], key)))

    def worth(self, key: bytes, now: float) -> float:
        return self.last_use[key]
