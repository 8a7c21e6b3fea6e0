"""The laws of a hybrid cache, checked on a store whose contents are a rolling model's."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

import rolling_model
from cache.holder import Holder
from cache.keys import KeyChain
from cache.payload import nbytes
from cache.plan import Limits, ResumePlan
from cache.retention.protocol import Policy
from cache.store import Store
from cache.tier import Tier
from cache.tiers import Storage
from cache_storage import Faulty, Remote
from oldest_first import OldestFirst
from rolling_model import ROW_NBYTES, STATE_NBYTES

Prefix = tuple[int, ...]


class Held(NamedTuple):
    """All bytes of one tier, by what they are of."""

    states: frozenset[bytes]
    pages: frozenset[bytes]


class Laws(RuleBasedStateMachine):
    """A store, its storage, and what must be true of them after every step."""

    policy: Policy = OldestFirst()
    """Of every tier, empty."""
    chains: list[KeyChain]
    """Of the beginnings of the prompt that is being served, by their length from 1 on."""

    @initialize(
        page=st.integers(1, 4),
        grid=st.integers(1, 4),
        budgets=st.tuples(*[st.sampled_from([0, 200, 500, 3000])] * 3),
    )
    def begin(self, page: int, grid: int, budgets: tuple[int, int, int]) -> None:
        self.page, self.limits, self.now = page, Limits(grid=grid), 0.0
        self.budgets = dict(zip(Tier, budgets))
        self.holder = Holder(self.empty())
        self.faulty = {tier: Faulty() for tier in list(Tier)[:3]}
        self.remote = Remote()
        self.storages: dict[Tier, Storage] = {**self.faulty, Tier.REMOTE: self.remote}
        self.prompts: dict[bytes, tuple[bytes, Prefix]] = {}
        self.pins: list[tuple[bytes, dict[Tier, Held]]] = []
        self.old: list[tuple[Store, object]] = []

    def empty(self) -> Store:
        sizes = {"state_nbytes": STATE_NBYTES, "row_nbytes": ROW_NBYTES}
        return Store.empty(self.budgets, self.policy, page=self.page, share=1.0, **sizes)  # type: ignore[arg-type]

    @property
    def store(self) -> Store:
        return self.holder.store

    def choose(self, at: int) -> bytes:
        keys = sorted(self.store.prompts.places)
        return keys[at % len(keys)]

    def choose_held(self, at: int) -> bytes:
        """Of those that a tier holds, if any does."""
        keys = sorted({key for shelf in self.store.shelves.values() for key in shelf.states})
        return keys[at % len(keys)] if keys else self.choose(at)

    def check_plan(self, tokens: Prefix, plan: ResumePlan) -> None:
        """Law 6: the deepest boundary below the last token whose state and pages are all held, whatever the lengths."""
        shelves = self.store.shelves.values()
        held = {f"state/{key.hex()}" for shelf in shelves for key in shelf.states}
        held |= {f"page/{name.hex()}" for shelf in shelves for name in shelf.pages} | set(self.remote.objects)
        whole = [
            chain.length
            for chain in self.chains[:-1]
            if held >= {f"state/{chain.key.hex()}", *(f"page/{name.hex()}" for name in chain.added)}
        ]
        assert plan.boundary == max(whole, default=0)
        if plan.boundary:
            chain = self.chains[plan.boundary - 1]
            having = [tier for tier, shelf in self.store.shelves.items() if chain.key in shelf.states]
            assert plan.state == min(having, default=Tier.REMOTE)
            for source in plan.rows:
                for name in chain.added[source.start // self.page : source.stop // self.page]:
                    having = [tier for tier, shelf in self.store.shelves.items() if name in shelf.pages]
                    assert source.tier == min(having, default=Tier.REMOTE)
        assert [source.start for source in plan.rows[1:]] == [source.stop for source in plan.rows[:-1]]
        assert (plan.rows[-1].stop if plan.rows else 0) == plan.boundary // self.page * self.page
        assert all(plan.boundary < missing.boundary < len(tokens) for missing in plan.missing)

    @invariant()
    def name_is_content(self) -> None:
        """Laws 7 and 8: what lies under a key is what the model has at its tokens, now as on the first day."""
        for shelf in self.store.shelves.values():
            for key, payload in shelf.states.items():
                namespace, tokens = self.prompts[key]
                state, pages = rolling_model.run(rolling_model.start(namespace), tokens).checkpoint(
                    len(tokens), self.page
                )
                assert same(payload, state)
                for name, page in zip(self.pages_of(key), pages, strict=True):
                    assert same(shelf.pages[name], page)

    @invariant()
    def bytes_are_conserved(self) -> None:
        """Law 10, and the index says of each tier what the tier holds."""
        nodes = [node for index in self.store.prompts.indexes.values() for node in index.nodes.values()]
        for tier, shelf in self.store.shelves.items():
            assert shelf.nbytes == sum(map(nbytes, (*shelf.states.values(), *shelf.pages.values())))
            assert 0 <= shelf.nbytes <= shelf.budget
            assert set(shelf.states) == {node.key for node in nodes if node.states & tier.bit}
            assert sorted(shelf.pages) == sorted(
                name for node in nodes if node.rows & tier.bit for name in node.names
            )
            assert sorted(shelf.policy.victims(2**60, self.now)) == sorted(shelf.states)
            needed = {name for key in shelf.states for name in self.pages_of(key)}
            kept = {name for key in self.store.pinned for name in self.pages_of(key)}
            assert needed <= set(shelf.pages) <= needed | kept

    @invariant()
    def pins_hold(self) -> None:
        for key, held in self.pins:
            for tier, then in held.items():
                now = self.held(key, tier)
                assert then.states <= now.states and then.pages <= now.pages

    def teardown(self) -> None:
        for key, _ in self.pins:
            self.holder.update(lambda store, key=key: store.unpin(key))
        for tier in self.store.shelves:
            self.holder.update(lambda store, tier=tier: store.evict(tier, 10**9, self.now))
        assert not self.store.pinned
        assert all(shelf.nbytes == 0 and not shelf.pages for shelf in self.store.shelves.values())
        self.holder.update(lambda store: store.forget(0))
        assert not self.store.prompts.places
        assert all(len(index.nodes) == 1 for index in self.store.prompts.indexes.values())
        for store, then in self.old:
            assert said(store) == then

    def pages_of(self, key: bytes) -> list[bytes]:
        index, place = self.store.prompts.index(key), self.store.prompts.places[key]
        return [name for _, node in reversed(list(index.ancestors(place.node))) for name in node.names]

    def held(self, key: bytes, tier: Tier) -> Held:
        shelf = self.store.shelves[tier]
        return Held(
            frozenset({key} & set(shelf.states)), frozenset(set(self.pages_of(key)) & set(shelf.pages))
        )

    def forget_pins(self, tier: Tier) -> None:
        """Bytes of a tier were lost: what pins are promised starts anew from what there is."""
        self.pins = [(key, {**held, tier: self.held(key, tier)}) for key, held in self.pins]

    def forget_broken_pins(self) -> None:
        for tier, storage in self.faulty.items():
            if storage.broken:
                self.forget_pins(tier)


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def said(store: Store) -> object:
    """Everything that a store says, by value."""
    nodes = {
        (namespace, at): (node.edge.tolist(), *node[:3], *node[4:])
        for namespace, index in store.prompts.indexes.items()
        for at, node in index.nodes.items()
    }
    shelves = {
        tier: (s.nbytes, tuple(s.policy.victims(2**60, 1e6)), contents(s.states), contents(s.pages))
        for tier, s in store.shelves.items()
    }
    return nodes, shelves, dict(store.prompts.places), dict(store.pinned), store.counts


def contents(payloads: Any) -> dict[bytes, tuple[tuple[str, bytes], ...]]:
    return {key: tuple((name, array.tobytes()) for name, array in p.items()) for key, p in payloads.items()}
