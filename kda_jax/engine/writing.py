"""New checkpoints to slower tiers, beside the steps: copied off the device piece by piece, written elsewhere."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import jax
import numpy as np

from cache.holder import Holder
from cache.tier import Tier
from cache.tiers import page_name, state_name
from cache.tokens import Tokens
from kda_jax.engine.explain import name as tier_name
from kda_jax.engine.memory import Memory
from kda_jax.engine.object_storage import ObjectStorage
from kda_jax.engine.pages import PoolPages
from kda_jax.engine.portable import Leaves, Portable
from kda_jax.engine.programs import Programs
from kda_jax.engine.prompt_keys import PromptKeys
from transfer import Objects, announce
from transfer.background import Background

PIECES = 4
"""Pieces that a step copies at most: of `Programs.moved_pages` pages each."""
PLACES = 16
"""Checkpoints that are being copied or written at once, for each tier; one that finds no place is not written."""
KNOWN = 2**20
"""Names that a store is remembered to hold."""
TIMEOUT = 30.0
"""Seconds that writing one checkpoint may take."""


@dataclass(slots=True)
class Copy:
    """A checkpoint on its way.

    Attributes:
        key: its name.
        namespace: its digest.
        tokens: all before it.
        numbers: pages of the pool still to copy: those of the state, then those of latents.
        names: of the pages of latents that are copied, in order.
        lacking: names of the pages that each tier lacks that it goes to.
        known: other boundaries of these tokens that have or had a checkpoint.
        pieces: copied so far, on the device.
    """

    key: bytes
    namespace: bytes
    tokens: Tokens
    numbers: list[int]
    names: list[bytes]
    lacking: Mapping[Tier, frozenset[bytes]]
    known: tuple[int, ...]
    pieces: list[jax.Array] = field(default_factory=list)


class Writing:
    """Writes through. All but what says so is called on the engine's thread."""

    def __init__(
        self,
        holder: Holder,
        programs: Programs,
        stores: Mapping[Tier, Objects],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            holder: of the store; its host tier, if it has one, takes what is written.
            programs: that copy pages.
            stores: of objects, by tier.
            post: has a call done on the engine's thread.
            clock: seconds.
        """
        self._holder, self._programs, self._stores = holder, programs, stores
        self._post, self._clock = post, clock
        self._portable = Portable(programs.layout)
        self._host = (Tier.HOST,) if Tier.HOST in holder.store.shelves else ()
        self._queue: deque[Copy] = deque()
        self._known: dict[Tier, OrderedDict[str, int]] = {tier: OrderedDict() for tier in stores}
        self._news = 0  # what came to be known together has one number
        self._backgrounds = {tier: Background(PLACES) for tier in (Tier.HOST, *stores)} if self.tiers else {}
        self._outstanding = 0
        self.written: Counter[str] = Counter()
        self.unwritten: Counter[str] = Counter()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that are written to."""
        return (*self._host, *self._stores)

    @property
    def known(self) -> Mapping[Tier, Container[str]]:
        """Names of the checkpoints and pages that each store of objects is known to hold, or is about to."""
        return self._known

    @property
    def waiting(self) -> bool:
        """Whether there is something to copy."""
        return bool(self._queue)

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return self._outstanding > 0

    def add(self, key: bytes) -> None:
        """A checkpoint was published on the device: its pages stay there until they are copied."""
        if (
            not self.tiers or key not in self._holder.store.shelves[Tier.DEVICE].states
        ):  # given up for another since
            return
        if len(self._queue) >= PLACES:
            self.unwritten.update(tier_name(tier) for tier in self.tiers)
            return
        store = self._holder.store
        index, place, shelf = store.prompts.index(key), store.prompts.places[key], store.shelves[Tier.DEVICE]
        tokens = index.tokens(place.node)
        path = [node for _, node in index.ancestors(place.node)]
        names = [page for node in reversed(path) for page in node.names]
        known = tuple(node.stop for node in path[1:] if node.key is not None)
        pages = [page_name(page) for page in names]
        above = [state_name(node.key) for node in path[1:] if node.key is not None]
        lacking = {
            tier: frozenset(store.prompts.lacks(key, tier))
            if tier in self._host
            else frozenset(page for page in names if page_name(page) not in self._known[tier])
            for tier in self._lacking(key, pages, above)
        }
        if not lacking:
            return
        copied = [page for page in names if any(page in each for each in lacking.values())]
        numbers = [
            number
            for payload in (shelf.states[key], *(shelf.pages[page] for page in copied))
            if isinstance(payload, PoolPages)
            for number in payload.pages
        ]
        del store, shelf  # old versions keep pages
        self._holder.update(lambda store: store.pin(key))
        for tier, pages in lacking.items():
            self.found(tier, (), [state_name(key)])
            self.found(tier, [state_name(key), *map(page_name, pages)], ())
        self._outstanding += len(lacking)
        self._queue.append(Copy(key, place.namespace, tokens, numbers, copied, lacking, known))

    def _lacking(self, key: bytes, pages: Sequence[str], above: Sequence[str]) -> list[Tier]:
        """Tiers that are not known to hold a checkpoint. One that has lost a page since, or a checkpoint above it,
        may have lost it too."""
        shelves = self._holder.store.shelves
        return [
            tier
            for tier in self.tiers
            if not (
                key in shelves[tier].states if tier in self._host else self._holds(tier, key, pages, above)
            )
        ]

    def _holds(self, tier: Tier, key: bytes, pages: Sequence[str], above: Sequence[str]) -> bool:
        known = self._known[tier]
        since = known.get(state_name(key))
        return (
            since is not None
            and all(known.get(page, since + 1) <= since for page in pages)
            and all(known.get(state, 0) <= since for state in above)
        )

    def copy(self, memory: Memory) -> None:
        """Has a few pages copied, without waiting for them."""
        left = PIECES
        while self._queue and left:
            first = self._queue[0]
            size = self._programs.moved_pages * left
            try:
                pieces = self._programs.read_pages(memory, first.numbers[:size])
            except Exception:  # as when the device has no room for the pieces
                self._queue.popleft()
                self._unpin(first)
                self._failed(first, tuple(first.lacking))
                continue
            first.pieces += pieces
            first.numbers = first.numbers[size:]
            left -= len(pieces)
            if not first.numbers:
                self._queue.popleft()
                self._unpin(first)
                if self._backgrounds[Tier.HOST].submit(self._leave, first) is None:
                    self._failed(first, tuple(first.lacking))

    def found(self, tier: Tier, there: Sequence[str], gone: Sequence[str]) -> None:
        """What a store was found to hold, and not to hold: names of states and pages."""
        known = self._known.get(tier)
        if known is None:
            return
        self._news += 1
        for each in there:
            known.setdefault(each, self._news)
            known.move_to_end(each)
        for each in gone:
            known.pop(each, None)
        while len(known) > KNOWN:
            known.popitem(last=False)

    def abandon(self) -> None:
        """The memory is lost, and with it what was not copied."""
        for copy in self._queue:
            self._unpin(copy)
            self._failed(copy, tuple(copy.lacking))
        self._queue.clear()

    def close(self) -> None:
        """Waits for what is being written and gives up what waits; on any thread, after the engine's has ended."""
        for background in self._backgrounds.values():
            background.close()

    def _unpin(self, copy: Copy) -> None:
        self._holder.update(lambda store: store.unpin(copy.key))

    # On a thread of its own

    def _leave(self, copy: Copy) -> None:
        """Off the device, and on to the tiers."""
        try:
            pages = np.concatenate([np.asarray(piece) for piece in copy.pieces])
            copy.pieces = []
            boundary = len(copy.tokens)
            count = self._programs.layout.snapshot_pages(boundary)
            state = self._portable.state(boundary, pages[:count])
            first = self._programs.layout.state_pages + 1
            latents = {page: self._portable.page(pages[first + at]) for at, page in enumerate(copy.names)}
        except Exception:
            self._post(partial(self._failed, copy, tuple(copy.lacking)))
            return
        del pages
        if Tier.HOST in copy.lacking:
            mine = {page: latents[page] for page in copy.names if page in copy.lacking[Tier.HOST]}
            self._post(partial(self._keep, copy, state, mine))
        for tier in copy.lacking.keys() - {Tier.HOST}:
            self._post(partial(self._send, copy, tier, state, latents))

    def _write(self, copy: Copy, tier: Tier, state: Leaves, latents: Mapping[bytes, Leaves]) -> None:
        """To a store of objects: pages, then the state, then the marks to find it by."""
        objects, boundary, until = self._stores[tier], len(copy.tokens), monotonic() + TIMEOUT
        keys = PromptKeys(copy.namespace, self._programs.layout.page_rows, copy.tokens)
        parts = [(page_name(page), latents[page]) for page in copy.names if page in copy.lacking[tier]]
        try:
            for name, payload in (*parts, (keys.name(boundary), state)):
                ObjectStorage(objects, copy.namespace, max(until - monotonic(), 1e-3)).write(name, payload)
            announce(objects, keys.name, [boundary], copy.known, max(until - monotonic(), 1e-3))
        except Exception:
            self._post(partial(self._failed, copy, (tier,)))
        else:
            self._post(partial(self._wrote, tier))

    # On the engine's thread again

    def _keep(self, copy: Copy, state: Leaves, latents: Mapping[bytes, Leaves]) -> None:
        now = self._clock()
        store = self._holder.update(lambda store: store.copied(copy.key, Tier.HOST, state, latents, now))
        if copy.key in store.shelves[Tier.HOST].states:
            self._wrote(Tier.HOST)
        else:
            self._failed(copy, (Tier.HOST,))

    def _send(self, copy: Copy, tier: Tier, state: Leaves, latents: Mapping[bytes, Leaves]) -> None:
        if self._backgrounds[tier].submit(self._write, copy, tier, state, latents) is None:
            self._failed(copy, (tier,))

    def _wrote(self, tier: Tier) -> None:
        self._outstanding -= 1
        self.written[tier_name(tier)] += 1

    def _failed(self, copy: Copy, tiers: Sequence[Tier]) -> None:
        self._outstanding -= len(tiers)
        for tier in tiers:
            self.unwritten[tier_name(tier)] += 1
            self.found(tier, (), [state_name(copy.key), *map(page_name, copy.lacking[tier])])
