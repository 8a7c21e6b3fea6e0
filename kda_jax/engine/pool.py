"""The pool between running requests and the cache: room is made by eviction, and checkpoints are published in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.holder import Holder
from cache.retention.protocol import Kind
from cache.store import Store
from cache.tier import Tier
from cache.tokens import Tokens
from kda_jax.engine.pages import Pages, PoolPages


class Pool:
    """Pages for requests and for checkpoints, out of one pool. The store's device tier holds `PoolPages` only."""

    def __init__(self, holder: Holder, pages: Pages) -> None:
        """
        Raises:
            ValueError: if the store has no device tier, or one with more bytes than the pool.
        """
        shelf = holder.store.shelves.get(Tier.DEVICE)
        nbytes = pages.capacity * pages.page_nbytes
        if shelf is None or shelf.budget > nbytes:
            raise ValueError(
                f"the store's device tier is the pool: at most {nbytes} bytes, got {shelf and shelf.budget}"
            )
        self.holder, self.pages = holder, pages

    def room(self, count: int, now: float, let_go: Callable[[], bool] = lambda: False) -> bool:
        """Evicts until `count` pages are free, or nothing more can be. Whether they are.

        Args:
            count: pages.
            now: seconds.
            let_go: gives a pin back, or says that there is none to give back.
        """
        while (lacking := count - self.pages.free) > 0:
            before = self._device_nbytes()
            self.holder.update(lambda store: store.evict(Tier.DEVICE, lacking * self.pages.page_nbytes, now))
            if self._device_nbytes() == before and not let_go():
                return False
        return True

    def publish(
        self,
        namespace: bytes,
        tokens: Tokens,
        table: Sequence[int],
        snapshot: tuple[int, ...],
        kind: Kind,
        now: float,
    ) -> bytes | None:
        """Passes a checkpoint to the store, which shares its pages of latents with the request.

        Args:
            namespace: of the request.
            tokens: all before the boundary.
            table: the request's pages.
            snapshot: pages of the state; the caller's hold on them passes to the store.
            kind: why the boundary was made.
            now: seconds.

        Returns:
            The boundary's key if the store holds it now.
        """
        unit = self.holder.store.prompts.page
        held = self.holder.store.match(namespace, tokens).covered(Tier.DEVICE.bit) // unit
        state = self.pages.payload(snapshot)
        rows = [self.pages.payload((page,)) for page in table[held : len(tokens) // unit]]
        self.pages.give_back(snapshot)
        store = self.holder.update(
            lambda store: store.put(namespace, tokens, state, rows, kind=kind, now=now, exact=False)
        )
        key = store.match(namespace, tokens).boundaries[-1].key
        return key if key in store.shelves[Tier.DEVICE].states else None

    def lose(self, key: bytes, tier: Tier, page: bytes | None, now: float) -> None:
        """Takes what could not be read out of a tier: a page by its name, or the state."""
        self.holder.update(lambda store: store.lose(key, tier, now, page))

    def clear(self, now: float) -> None:
        """The device tier loses all that it holds. Nothing is pinned."""

        def cleared(store: Store) -> Store:
            for key in list(store.shelves[Tier.DEVICE].states):
                store = store.lose(key, Tier.DEVICE, now)
            return store

        self.holder.update(cleared)

    def holds(self, namespace: bytes, tokens: Tokens) -> bool:
        """Whether the device tier has the checkpoint behind these tokens."""
        boundaries = self.holder.store.match(namespace, tokens).boundaries
        return bool(boundaries) and boundaries[-1].boundary == len(tokens) and bool(boundaries[-1].tiers & 1)

    def page(self, name: bytes) -> int:
        """The page of the pool that a page of latents lies in."""
        payload = self.holder.store.shelves[Tier.DEVICE].pages[name]
        assert isinstance(payload, PoolPages)
        return payload.pages[0]

    def state(self, key: bytes) -> tuple[int, ...]:
        """The pages of the pool that a state lies in."""
        payload = self.holder.store.shelves[Tier.DEVICE].states[key]
        assert isinstance(payload, PoolPages)
        return payload.pages

    def _device_nbytes(self) -> int:
        return self.holder.store.shelves[Tier.DEVICE].nbytes
