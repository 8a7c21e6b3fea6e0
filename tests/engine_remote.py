"""A twin of the remote store: objects by name that others share, that come late, are refused, get lost or damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_device import require

from cache.keys import KeyChain
from cache.tier import Tier
from cache.tokens import Tokens
from cache.view import Rows, Seen, View

if TYPE_CHECKING:
    from engine_simulation import World


class Remote:
    """Objects by name: pages of latents and states. The first who puts a name wins."""

    def __init__(self, world: World, most: int) -> None:
        self.world, self.most = world, most
        self.objects: dict[bytes, Any] = {}
        """None under a name is what digests show to be damaged: it is found, and cannot be read."""
        self.leases: dict[bytes, float] = {}

    def find(self, namespace: bytes, tokens: Tokens, unit: int) -> View:
        """What there is of a prompt now; it may be gone when it is read."""
        chain, rows, boundaries = KeyChain.start(namespace, unit), [], []
        for boundary in range(1, len(tokens) + 1):
            chain = chain.extend(tokens[boundary - 1 : boundary])
            if chain.added and b"page" + chain.added[0] in self.objects:
                rows.append(Rows(boundary - unit, boundary, Tier.REMOTE.bit))
                self.lease(b"page" + chain.added[0])
            if b"state" + chain.key in self.objects:
                boundaries.append(Seen(boundary, Tier.REMOTE.bit, chain.key))
                self.lease(b"state" + chain.key)
        return View(0, tuple(rows), tuple(boundaries))

    def lease(self, name: bytes) -> None:
        """Who was asked for something keeps it for a while."""
        self.leases[name] = self.world.now + 10.0

    def put(self, key: bytes, state: Any, pages: dict[bytes, Any]) -> None:
        """Pages one after another, then the state."""
        if not self.most or self.world.fault("full"):
            self.world.happened["refused"] += 1
            return
        parts = [(b"page" + name, page) for name, page in pages.items()]
        self.later([*parts, (b"state" + key, state)])

    def later(self, parts: list[tuple[bytes, Any]]) -> None:
        """The first of these is written some time later, and then the others."""
        if parts:
            self.world.after(self.world.streams["remote"].random(), "put", lambda: self.write(parts))

    def write(self, parts: list[tuple[bytes, Any]]) -> None:
        """An object is there from now on, and the oldest without a lease goes if there is no room; without one, it is
        refused, and nothing is written behind it."""
        (name, content), *more = parts
        if self.objects.get(name) is None:
            if name not in self.objects and len(self.objects) >= self.most and not self.give_up():
                self.world.happened["leased"] += 1
                return
            self.objects[name] = content
        require(self.objects[name] == content, "a name has one content")
        if self.world.fault("lost"):
            del self.objects[self.any()]
        if self.objects and self.world.fault("damaged"):
            self.objects[self.any()] = None
        self.later(more)

    def give_up(self) -> bool:
        """Whether the oldest object without a lease could go."""
        free = next((name for name in self.objects if self.leases.get(name, 0.0) <= self.world.now), None)
        if free is not None:
            del self.objects[free]
        return free is not None

    def any(self) -> bytes:
        return self.world.streams["remote"].choice(list(self.objects))
