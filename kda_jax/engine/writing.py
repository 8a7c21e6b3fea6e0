"""New checkpoints to slower tiers, beside the steps: copied off the device piece by piece, written elsewhere."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import NamedTuple

import numpy as np

from cache.holder import Holder
from cache.payload import nbytes as size
from cache.tier import Tier
from cache.tiers import page_name, state_name
from cache.tokens import Tokens
from kda_jax.engine.copying import Copy, Copying
from kda_jax.engine.explain import name as tier_name
from kda_jax.engine.object_storage import ObjectStorage, OtherBytes
from kda_jax.engine.pages import PoolPages
from kda_jax.engine.portable import Leaves, Portable
from kda_jax.engine.programs import Programs
from kda_jax.engine.prompt_keys import PromptKeys
from transfer import Objects, announce

PLACES = 16
"""Checkpoints that may wait to be copied, however large they are."""
WAITING = 0.25
"""The part of the pool's pages that may wait beyond these; a checkpoint that would make it more is not written."""
UNSENT = 2**32
"""Bytes of checkpoints that wait in host memory for each store, or one checkpoint; those beyond are not written."""
KNOWN = 2**20
"""Names that a store is remembered to hold."""
TIMEOUT = 30.0
"""Seconds that writing one checkpoint may take."""


class Leaving(NamedTuple):
    """A checkpoint on its way.

    Attributes:
        key: its name.
        namespace: its digest.
        tokens: all before it.
        names: of the pages of latents that are copied, in order.
        lacking: names of the pages that each tier lacks that it goes to.
        known: other boundaries of these tokens that have or had a checkpoint.
    """

    key: bytes
    namespace: bytes
    tokens: Tokens
    names: tuple[bytes, ...]
    lacking: Mapping[Tier, frozenset[bytes]]
    known: tuple[int, ...]


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
        self._holder, self._layout, self._stores = holder, programs.layout, stores
        self._post, self._clock = post, clock
        self._portable = Portable(programs.layout)
        self._host = (Tier.HOST,) if Tier.HOST in holder.store.shelves else ()
        self._known: dict[Tier, OrderedDict[str, int]] = {tier: OrderedDict() for tier in stores}
        self._news = 0  # what came to be known together has one number
        self._threads = {tier: ThreadPoolExecutor(1, f"kda-jax write {tier_name(tier)}") for tier in stores}
        self._unsent: Counter[Tier] = Counter()
        self._outstanding = 0
        self.copying = Copying(programs, post)
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
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return self._outstanding > 0

    def add(self, key: bytes) -> None:
        """A checkpoint was published on the device: its pages stay there until they are copied."""
        if (
            not self.tiers or key not in self._holder.store.shelves[Tier.DEVICE].states
        ):  # given up for another since
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
        copied = tuple(page for page in names if any(page in each for each in lacking.values()))
        numbers = tuple(
            number
            for payload in (shelf.states[key], *(shelf.pages[page] for page in copied))
            if isinstance(payload, PoolPages)
            for number in payload.pages
        )
        del store, shelf  # old versions keep pages
        if not self._has_place(len(numbers)):
            self.unwritten.update(map(tier_name, lacking))
            return
        self._holder.update(lambda store: store.pin(key))
        for tier, pages in lacking.items():
            self.found(tier, (), [state_name(key)])
            self.found(tier, [state_name(key), *map(page_name, pages)], ())
        self._outstanding += len(lacking)
        leaving = Leaving(key, place.namespace, tokens, copied, lacking, known)
        self.copying.add(
            Copy(
                numbers,
                left=partial(self._unpin, key),
                arrived=partial(self._leave, leaving),
                failed=partial(self._failed, leaving, tuple(lacking)),
            )
        )

    def _has_place(self, pages: int) -> bool:
        """Whether one more may wait: it is pinned, and what is pinned is no room for requests."""
        most = WAITING * self._layout.num_pages
        return self.copying.count < PLACES or self.copying.pages + pages <= most

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

    def close(self) -> None:
        """Waits for what is being written and gives up what waits; on any thread, after the engine's has ended."""
        self.copying.close()
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)

    def _unpin(self, key: bytes) -> None:
        self._holder.update(lambda store: store.unpin(key))

    # On threads of its own

    def _leave(self, leaving: Leaving, pages: np.ndarray) -> None:
        """Off the device, and on to the tiers."""
        try:
            boundary, first = len(leaving.tokens), self._layout.state_pages + 1
            state = self._portable.state(boundary, pages[: self._layout.snapshot_pages(boundary)])
            latents = {page: self._portable.page(pages[first + at]) for at, page in enumerate(leaving.names)}
        except Exception:
            self._post(partial(self._failed, leaving, tuple(leaving.lacking)))
            return
        for tier, lacking in leaving.lacking.items():
            mine = {page: latents[page] for page in leaving.names if page in lacking}
            call = partial(self._keep, leaving) if tier is Tier.HOST else partial(self._send, leaving, tier)
            self._post(partial(call, state, mine))

    def _write(self, leaving: Leaving, tier: Tier, state: Leaves, latents: Mapping[bytes, Leaves]) -> None:
        """To a store of objects: pages, then the state, then the marks to find it by. What another engine has written
        of the same tokens differs from ours by rounding at most: it serves as well, and stays."""
        objects, boundary, until = self._stores[tier], len(leaving.tokens), monotonic() + TIMEOUT
        keys = PromptKeys(leaving.namespace, self._layout.page_rows, leaving.tokens)
        parts = [(page_name(page), payload) for page, payload in latents.items()]
        for name, payload in (*parts, (keys.name(boundary), state)):
            storage = ObjectStorage(objects, leaving.namespace, max(until - monotonic(), 1e-3))
            with suppress(OtherBytes):
                storage.write(name, payload)
        announce(objects, keys.name, [boundary], leaving.known, max(until - monotonic(), 1e-3))

    # On the engine's thread again

    def _keep(self, leaving: Leaving, state: Leaves, latents: Mapping[bytes, Leaves]) -> None:
        now = self._clock()
        store = self._holder.update(lambda store: store.copied(leaving.key, Tier.HOST, state, latents, now))
        if leaving.key in store.shelves[Tier.HOST].states:
            self._wrote(Tier.HOST)
        else:
            self._failed(leaving, (Tier.HOST,))

    def _send(self, leaving: Leaving, tier: Tier, state: Leaves, latents: Mapping[bytes, Leaves]) -> None:
        nbytes = size(state) + sum(map(size, latents.values()))
        if 0 < self._unsent[tier] and self._unsent[tier] + nbytes > UNSENT:
            self._failed(leaving, (tier,))
            return
        self._unsent[tier] += nbytes

        def write() -> None:
            try:
                self._write(leaving, tier, state, latents)
            except Exception:
                ended = partial(self._failed, leaving, (tier,))
            else:
                ended = partial(self._wrote, tier)
            self._post(partial(self._sent, tier, nbytes, ended))

        self._threads[tier].submit(write)

    def _sent(self, tier: Tier, nbytes: int, ended: Callable[[], None]) -> None:
        self._unsent[tier] -= nbytes
        ended()

    def _wrote(self, tier: Tier) -> None:
        self._outstanding -= 1
        self.written[tier_name(tier)] += 1

    def _failed(self, leaving: Leaving, tiers: Sequence[Tier]) -> None:
        self._outstanding -= len(tiers)
        for tier in tiers:
            self.unwritten[tier_name(tier)] += 1
            self.found(tier, (), [state_name(leaving.key), *map(page_name, leaving.lacking[tier])])
