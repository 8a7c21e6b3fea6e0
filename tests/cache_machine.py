"""Random histories of a store, with the laws of a hybrid cache checked after every step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import rolling_model
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oldest_first import OldestFirst
from rolling_model import ROW_NBYTES, STATE_NBYTES

from cache.errors import Broken, Conflict
from cache.holder import Holder
from cache.keys import KeyChain
from cache.payload import nbytes
from cache.placement import place
from cache.plan import Limits, ResumePlan
from cache.retention.protocol import Creation, Kind
from cache.store import Store
from cache.tier import Tier
from cache.tiers import InMemory, Storage, demote, load, make_room, promote
from cache.view import Rows, Seen, View

Prefix = tuple[int, ...]
NAMESPACES = (b"a" * 32, b"b" * 32)
prompts = st.tuples(
    st.sampled_from(NAMESPACES), st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
)
tiers = st.sampled_from(list(Tier)[:3])
number = st.integers(0, 10**6)


class Faulty(InMemory):
    """Storage that cannot read some of its objects again, and can be full."""

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
        return kept


class Remote:
    """A store elsewhere, with habits of its own: it gives up any object at any time."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def write(self, name: str, payload: Any) -> Any:
        return self.objects.setdefault(name, payload)

    def read(self, name: str, kept: Any) -> Any:
        if name not in self.objects:
            raise OSError("not found")
        return self.objects[name]

    def look(self, chains: list[KeyChain], page: int) -> View:
        """What it has of a prompt, by the chains of its beginnings."""
        names = chains[-1].added
        rows = [
            Rows(at * page, (at + 1) * page, Tier.REMOTE.bit)
            for at, name in enumerate(names)
            if f"page/{name.hex()}" in self.objects
        ]
        found = tuple(
            Seen(c.length, Tier.REMOTE.bit) for c in chains if f"state/{c.key.hex()}" in self.objects
        )
        ends = [*(each.stop for each in rows), *(each.boundary for each in found)]
        return View(max(ends, default=0), tuple(rows), found)


class Held(NamedTuple):
    """All bytes of one tier, by what they are of."""

    states: frozenset[bytes]
    pages: frozenset[bytes]


class StoreMachine(RuleBasedStateMachine):
    """Requests that resume, put, stop anywhere; pins, evictions, copies between tiers, bytes that break."""

    @initialize(
        page=st.integers(1, 4),
        grid=st.integers(1, 4),
        budgets=st.tuples(*[st.sampled_from([0, 200, 500, 3000])] * 3),
    )
    def begin(self, page: int, grid: int, budgets: tuple[int, int, int]) -> None:
        self.page, self.limits, self.now = page, Limits(grid=grid), 0.0
        store = Store.empty(
            dict(zip(Tier, budgets)),
            OldestFirst(),
            state_nbytes=STATE_NBYTES,
            row_nbytes=ROW_NBYTES,
            page=page,
            share=1.0,
        )
        self.holder = Holder(store)
        self.faulty = {tier: Faulty() for tier in list(Tier)[:3]}
        self.remote = Remote()
        self.storages: dict[Tier, Storage] = {**self.faulty, Tier.REMOTE: self.remote}
        self.prompts: dict[bytes, tuple[bytes, Prefix]] = {}
        self.pins: list[tuple[bytes, dict[Tier, Held]]] = []
        self.old: list[tuple[Store, object]] = []

    @property
    def store(self) -> Store:
        return self.holder.store

    def choose(self, at: int) -> bytes:
        keys = sorted(self.store.prompts.places)
        return keys[at % len(keys)]

    def put(self, namespace: bytes, tokens: Prefix, run: rolling_model.Run, kind: Kind, tier: Tier) -> None:
        state, pages = run.checkpoint(len(tokens), self.page)
        before = self.store
        after = self.holder.update(
            lambda store: store.put(
                namespace, np.array(tokens, np.int32), state, pages, kind=kind, now=self.now, tier=tier
            )
        )
        self.prompts |= {
            key: (namespace, tokens) for key in after.prompts.places if key not in before.prompts.places
        }

    # a request, from its prompt to what it leaves behind

    @rule(prompt=prompts, base=number, keep=st.integers(0, 12), stop=st.integers(0, 5), tier=tiers)
    def request(self, prompt: tuple[bytes, Prefix], base: int, keep: int, stop: int, tier: Tier) -> None:
        """A prompt that begins like another. It puts `stop` of its checkpoints, then ends or is aborted."""
        if self.store.prompts.places:
            namespace, before = self.prompts[self.choose(base)]
            prompt = namespace, (*before[:keep], *prompt[1])
        self.serve(prompt, stop, tier)

    @precondition(lambda self: self.store.prompts.places)
    @rule(base=number, more=st.lists(st.integers(0, 2), max_size=3).map(tuple), tier=tiers)
    def turn(self, base: int, more: Prefix, tier: Tier) -> None:
        """A conversation goes on, or the same prompt comes again."""
        namespace, before = self.prompts[self.choose(base)]
        self.serve((namespace, (*before, *more)), 5, tier)

    def serve(self, prompt: tuple[bytes, Prefix], stop: int, tier: Tier) -> None:
        self.now += 1
        namespace, tokens = prompt
        if len(self.old) < 5:
            self.old.append((self.store, said(self.store)))
        array = np.array(tokens, np.int32)
        seen = self.store.match(namespace, array)
        self.chains = [
            KeyChain.start(namespace, self.page).extend(array[:t]) for t in range(1, len(tokens) + 1)
        ]
        remote = self.remote.look(self.chains, self.page)
        plan = self.store.plan(seen, len(tokens), self.limits, remote)
        self.check_plan(tokens, plan)
        assert self.store.plan(seen, len(tokens), self.limits).boundary <= plan.boundary
        if not self.resume(namespace, tokens, plan):
            plan = self.store.plan(View(seen.length), len(tokens), self.limits)
        key = plan.key
        run = self.run
        self.holder.update(lambda store: store.used(seen, key, self.now))
        cold = rolling_model.run(rolling_model.start(namespace), tokens)
        assert run.answer == cold.answer, "a resumed request answered otherwise than one that never stopped"
        for boundary, kind in place(plan, len(tokens), self.limits, Creation(interval=5))[:stop]:
            self.put(namespace, tokens[:boundary], run, kind, tier)
        if stop == 5:  # the end of what was generated, wherever that is
            self.put(namespace, tokens, run, Kind.GENERATION_END, tier)
        if key is not None:
            self.holder.update(lambda store: store.unpin(key))

    def resume(self, namespace: bytes, tokens: Prefix, plan: ResumePlan) -> bool:
        """Pins, loads and computes; from the first token if something cannot be loaded."""
        self.run, key, whole = rolling_model.start(namespace), plan.key, True
        if key is not None:
            self.holder.update(lambda store: store.pin(key))
        if plan.boundary:
            try:
                loaded = load(self.store, plan, self.chains[plan.boundary - 1], self.storages)
                self.run = rolling_model.resumed(plan.boundary, loaded.state, loaded.pages)
            except Broken as broken:
                whole, (tier, page) = False, (broken.tier, broken.page)
                if key is not None:
                    self.holder.update(lambda store: store.unpin(key).lose(key, tier, self.now, page))
                    self.forget_broken_pins()
        self.run = rolling_model.run(self.run, tokens[self.run.start :])
        return whole

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

    # single steps

    @rule(prompt=prompts)
    def remember(self, prompt: tuple[bytes, Prefix]) -> None:
        before = self.store
        after = self.holder.update(
            lambda store: store.remember(
                prompt[0], np.array(prompt[1], np.int32), kind=Kind.PROMPT_END, now=self.now
            )
        )
        self.prompts |= {key: prompt for key in after.prompts.places if key not in before.prompts.places}

    @precondition(lambda self: self.store.prompts.places)
    @rule(at=number)
    def put_again(self, at: int) -> None:
        """The same bytes change nothing, others are refused."""
        key = self.choose(at)
        namespace, tokens = self.prompts[key]
        array = np.array(tokens, np.int32)
        run = rolling_model.run(rolling_model.start(namespace), tokens)
        state, pages = run.checkpoint(len(tokens), self.page)
        other = {**state, "recurrent": state["recurrent"][::-1].copy()}
        for tier, shelf in self.store.shelves.items():
            if key in shelf.states:
                again = self.store.put(
                    namespace, array, state, pages, kind=Kind.MARK, now=self.now, tier=tier
                )
                assert again is self.store
                with pytest.raises(Conflict):
                    self.store.put(namespace, array, other, pages, kind=Kind.MARK, now=self.now, tier=tier)

    @precondition(lambda self: self.store.prompts.places)
    @rule(at=number)
    def pin(self, at: int) -> None:
        key = self.choose(at)
        self.holder.update(lambda store: store.pin(key))
        self.pins.append((key, {tier: self.held(key, tier) for tier in self.store.shelves}))

    @precondition(lambda self: self.pins)
    @rule(at=number)
    def unpin(self, at: int) -> None:
        key, _ = self.pins.pop(at % len(self.pins))
        after = self.holder.update(lambda store: store.unpin(key))
        if key not in {pinned for pinned, _ in self.pins}:
            with pytest.raises(ValueError, match="more often than pinned"):
                after.unpin(key)

    @rule(tier=tiers, num_bytes=st.integers(0, 400))
    def evict(self, tier: Tier, num_bytes: int) -> None:
        before = self.store.shelves[tier]
        after = self.holder.update(lambda store: store.evict(tier, num_bytes, self.now)).shelves[tier]
        left = set(after.states) - {key for key, _ in self.pins}
        assert before.nbytes - after.nbytes >= min(num_bytes, before.nbytes) or not left

    @rule(tier=tiers, num_bytes=st.integers(0, 400))
    def make_room(self, tier: Tier, num_bytes: int) -> None:
        done = make_room(self.holder, tier, num_bytes, self.storages, self.now)
        shelf = self.store.shelves[tier]
        assert done == (shelf.nbytes + num_bytes <= shelf.budget)
        self.forget_broken_pins()

    @precondition(lambda self: self.store.prompts.places)
    @rule(at=number, tier=tiers)
    def demote(self, at: int, tier: Tier) -> None:
        key = self.choose(at)
        kept = demote(self.holder, key, tier, self.storages, self.now)
        assert kept == any(key in s.states for other, s in self.store.shelves.items() if other > tier)
        self.forget_broken_pins()

    @precondition(lambda self: self.store.prompts.places)
    @rule(at=number, tier=tiers)
    def promote(self, at: int, tier: Tier) -> None:
        key = self.choose(at)
        there = promote(self.holder, key, tier, self.storages, self.now)
        assert there == (key in self.store.shelves[tier].states)
        self.forget_broken_pins()

    @precondition(lambda self: self.store.prompts.places)
    @rule(at=number, tier=tiers, page=number)
    def corrupt(self, at: int, tier: Tier, page: int) -> None:
        """Some bytes cannot be read any more; whoever reads them next finds out."""
        key = self.choose(at)
        names = [f"state/{key.hex()}", *(f"page/{name.hex()}" for name in self.pages_of(key))]
        self.faulty[tier].broken.add(names[page % len(names)])

    @precondition(lambda self: any(shelf.states for shelf in self.store.shelves.values()))
    @rule(at=number)
    def write_through(self, at: int) -> None:
        """A checkpoint is copied to the remote store."""
        keys = sorted({key for shelf in self.store.shelves.values() for key in shelf.states})
        key = keys[at % len(keys)]
        shelf = next(shelf for shelf in self.store.shelves.values() if key in shelf.states)
        for name in self.pages_of(key):
            self.remote.write(f"page/{name.hex()}", shelf.pages[name])
        self.remote.write(f"state/{key.hex()}", shelf.states[key])

    @precondition(lambda self: self.remote.objects)
    @rule(at=number)
    def remote_gives_up(self, at: int) -> None:
        names = sorted(self.remote.objects)
        del self.remote.objects[names[at % len(names)]]

    @rule(tier=tiers)
    def fill_or_free_the_disk(self, tier: Tier) -> None:
        self.faulty[tier].full = not self.faulty[tier].full

    @rule(most=st.integers(0, 8))
    def forget(self, most: int) -> None:
        before = self.store
        after = self.holder.update(lambda store: store.forget(most))
        gone = set(before.prompts.places) - set(after.prompts.places)
        assert not gone & {key for key, _ in self.pins}
        assert not gone & {key for shelf in before.shelves.values() for key in shelf.states}

    # what holds after every step

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
            assert set(shelf.policy.last_use) == set(shelf.states)  # type: ignore[attr-defined]
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
        tier: (s.nbytes, dict(s.policy.last_use), contents(s.states), contents(s.pages))  # type: ignore[attr-defined]
        for tier, s in store.shelves.items()
    }
    return nodes, shelves, dict(store.prompts.places), dict(store.pinned), store.counts


def contents(payloads: Any) -> dict[bytes, tuple[tuple[str, bytes], ...]]:
    return {key: tuple((name, array.tobytes()) for name, array in p.items()) for key, p in payloads.items()}
