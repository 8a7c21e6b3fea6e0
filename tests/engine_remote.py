"""A twin of the remote store: objects by name that others share, that come late, are refused and get lost."""

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

    def find(self, namespace: bytes, tokens: Tokens, unit: int) -> View:
        """What there is of a prompt now; it may be gone when it is read."""
        chain, rows, boundaries = KeyChain.start(namespace, unit), [], []
        for boundary in range(1, len(tokens) + 1):
            chain = chain.extend(tokens[boundary - 1 : boundary])
            if chain.added and b"page" + chain.added[0] in self.objects:
                rows.append(Rows(boundary - unit, boundary, Tier.REMOTE.bit))
            if b"state" + chain.key in self.objects:
                boundaries.append(Seen(boundary, Tier.REMOTE.bit, chain.key))
        return View(0, tuple(rows), tuple(boundaries))

    def put(self, key: bytes, state: Any, pages: dict[bytes, Any]) -> None:
        """Pages one after another, then the state; a write that is refused ends it."""
        if not self.most or self.world.fault("full"):
            self.world.happened["refused"] += 1
            return
        late, delay = self.world.streams["remote"], 0.0
        for name, page in [
            *((b"page" + name, page) for name, page in pages.items()),
            (b"state" + key, state),
        ]:
            delay += late.random()
            self.world.after(delay, "put", lambda name=name, page=page: self.write(name, page))

    def write(self, name: bytes, content: Any) -> None:
        """An object is there from now on; the oldest goes if that is too much."""
        require(self.objects.setdefault(name, content) == content, "a name has one content")
        while len(self.objects) > self.most:
            del self.objects[next(iter(self.objects))]
        if self.world.fault("lost"):
            lost = self.world.streams["remote"].choice(list(self.objects))
            del self.objects[lost]
