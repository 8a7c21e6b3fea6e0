"""Random histories of a store under the laws."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import rolling_model
from cache.errors import Broken, Conflict
from cache.holder import Holder
from cache.keys import KeyChain
from cache.placement import place
from cache.plan import ResumePlan
from cache.retention.protocol import Creation, Kind
from cache.tier import Tier
from cache.tiers import demote, load, make_room, promote
from cache.view import View
from cache_laws import Laws, Prefix, said
from rolling_model import ROW_NBYTES, STATE_NBYTES

NAMESPACES = (b"a" * 32, b"b" * 32)
prompts = st.tuples(
    st.sampled_from(NAMESPACES), st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
)
tiers = st.sampled_from(list(Tier)[:3])
number = st.integers(0, 10**6)


def history_settings(steps: int, *, shrink: bool = True) -> settings:
    """Histories of 50 steps, the same ones each time, with so many steps in all."""
    return settings(
        max_examples=max(1, steps // 50),
        stateful_step_count=50,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        report_multiple_bugs=False,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class StoreMachine(Laws):
    """Requests that resume, put, stop anywhere; pins, evictions, copies between tiers, bytes that break."""

    def put(
        self,
        namespace: bytes,
        tokens: Prefix,
        run: rolling_model.Run,
        kind: Kind,
        tier: Tier,
        seen: View | None = None,
    ) -> None:
        state, pages = run.checkpoint(len(tokens), self.page)
        before = self.store
        after = self.holder.update(
            lambda store: store.put(
                namespace,
                np.array(tokens, np.int32),
                state,
                pages,
                kind=kind,
                now=self.now,
                tier=tier,
                seen=seen,
            )
        )
        self.prompts |= {
            key: (namespace, tokens) for key in after.prompts.places if key not in before.prompts.places
        }

    # a request, from its prompt to what it leaves behind

    @rule(
        prompt=prompts, base=number, keep=st.integers(0, 12), stop=st.integers(0, 5), tier=tiers, other=tiers
    )
    def request(
        self, prompt: tuple[bytes, Prefix], base: int, keep: int, stop: int, tier: Tier, other: Tier
    ) -> None:
        """A prompt that begins like another. It puts `stop` of its checkpoints, then ends or is aborted."""
        if self.prompts:
            namespace, before = self.prompts[sorted(self.prompts)[base % len(self.prompts)]]
            prompt = namespace, (*before[:keep], *prompt[1])
        self.serve(prompt, stop, tier, other)

    @precondition(lambda self: self.store.prompts.places)
    @rule(base=number, more=st.lists(st.integers(0, 2), max_size=3).map(tuple), tier=tiers, other=tiers)
    def turn(self, base: int, more: Prefix, tier: Tier, other: Tier) -> None:
        """A conversation goes on, or the same prompt comes again."""
        namespace, before = self.prompts[self.choose_held(base)]
        self.serve((namespace, (*before, *more)), 5, tier, other)

    def serve(self, prompt: tuple[bytes, Prefix], stop: int, tier: Tier, other: Tier) -> None:
        """One request, whose checkpoints go to `tier`. While it loads, others make `other` give up all it can."""
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
        if not self.resume(namespace, tokens, plan, other):
            plan = self.store.plan(View(seen.length), len(tokens), self.limits)
        key = plan.key
        run = self.run
        self.holder.update(lambda store: store.used(seen, key, self.now))
        cold = rolling_model.run(rolling_model.start(namespace), tokens)
        assert run.answer == cold.answer, "a resumed request answered otherwise than one that never stopped"
        for boundary, kind in place(plan, len(tokens), self.limits, Creation(interval=5))[:stop]:
            self.put(namespace, tokens[:boundary], run, kind, tier, seen if stop % 2 else None)
        if stop == 5:  # the end of what was generated, wherever that is
            self.put(namespace, tokens, run, Kind.GENERATION_END, tier)
        if key is not None:
            self.holder.update(lambda store: store.unpin(key))

    def resume(self, namespace: bytes, tokens: Prefix, plan: ResumePlan, other: Tier) -> bool:
        """Pins, loads and computes; from the first token if something cannot be loaded."""
        self.run, key, whole = rolling_model.start(namespace), plan.key, True
        if key is not None:
            self.holder.update(lambda store: store.pin(key).evict(other, 10**9, self.now))
        if plan.boundary:
            try:
                loaded = load(self.store, plan, self.chains[plan.boundary - 1], self.storages)
                self.run = rolling_model.resumed(plan.boundary, loaded.state, loaded.pages)
            except Broken as broken:
                whole, (tier, page) = False, (broken.tier, broken.page)
                assert self.faulty[tier].broken, f"what a pin keeps is gone: {broken}"
                if key is not None:
                    self.holder.update(lambda store: store.unpin(key).lose(key, tier, self.now, page))
                    self.forget_broken_pins()
        self.run = rolling_model.run(self.run, tokens[self.run.start :])
        return whole

    # what happens between requests

    @precondition(lambda self: self.prompts)
    @rule(at=number, unpin=st.booleans())
    def pin(self, at: int, unpin: bool) -> None:
        if unpin and self.pins:
            key, _ = self.pins.pop(at % len(self.pins))
            after = self.holder.update(lambda store: store.unpin(key))
            if key not in {pinned for pinned, _ in self.pins}:
                with pytest.raises(ValueError, match="more often than pinned"):
                    after.unpin(key)
        elif self.store.prompts.places:
            key = self.choose(at)
            self.holder.update(lambda store: store.pin(key))
            self.pins.append((key, {tier: self.held(key, tier) for tier in self.store.shelves}))

    @precondition(lambda self: self.store.prompts.places)
    @rule(move=st.sampled_from(["evict", "make room", "demote", "promote"]), at=number, tier=tiers)
    def move(self, move: str, at: int, tier: Tier) -> None:
        """Bytes go, or go elsewhere."""
        key, before, num_bytes = self.choose_held(at), self.store.shelves[tier], at % 400
        if move == "evict":
            self.holder.update(lambda store: store.evict(tier, num_bytes, self.now))
            after = self.store.shelves[tier]
            unpinned = set(after.states) - {key for key, _ in self.pins}
            assert before.nbytes - after.nbytes >= min(num_bytes, before.nbytes) or not unpinned
        elif move == "make room":
            done = make_room(self.holder, tier, num_bytes, self.storages, self.now)
            assert done == (self.store.shelves[tier].nbytes + num_bytes <= before.budget)
        elif move == "demote":
            tokens = len(self.prompts[key][1])
            size = STATE_NBYTES + ROW_NBYTES * tokens
            slower = [(other, self.store.shelves[other]) for other in self.faulty if other > tier]
            room = any(s.budget - s.nbytes >= size and not self.faulty[o].full for o, s in slower)
            readable = not any(storage.broken for storage in self.faulty.values())
            kept = demote(self.holder, key, tier, self.storages, self.now)
            assert kept == any(key in self.store.shelves[other].states for other, _ in slower)
            assert kept or key not in before.states or not room or not readable
        else:
            there = promote(self.holder, key, tier, self.storages, self.now)
            assert there == (key in self.store.shelves[tier].states)
        self.forget_broken_pins()

    @precondition(lambda self: self.store.prompts.places)
    @rule(fault=st.sampled_from(["broken", "broken", "full", "elsewhere"]), at=number, tier=tiers)
    def fault(self, fault: str, at: int, tier: Tier) -> None:
        """Bytes that cannot be read again; a tier that is full, or not any more; a new instance, with what the remote
        store has."""
        if fault == "broken":
            key = self.choose_held(at)
            names = [f"state/{key.hex()}", *(f"page/{name.hex()}" for name in self.pages_of(key))]
            self.faulty[tier].broken.add(names[at % len(names)])
        elif fault == "full":
            self.faulty[tier].full = not self.faulty[tier].full
        elif self.remote.objects:
            self.pins.clear()
            self.holder = Holder(self.empty())

    @precondition(lambda self: any(shelf.states for shelf in self.store.shelves.values()))
    @rule(at=number, gone=st.integers(0, 8))
    def write_through(self, at: int, gone: int) -> None:
        """A checkpoint is copied to the remote store, which may give up one of its objects, or one of others."""
        key = self.choose_held(at)
        shelf = next(shelf for shelf in self.store.shelves.values() if key in shelf.states)
        pages = [(f"page/{name.hex()}", shelf.pages[name]) for name in self.pages_of(key)]
        for name, payload in [(f"state/{key.hex()}", shelf.states[key]), *pages]:
            self.remote.write(name, payload)
        names = [name for name, _ in pages] if gone % 2 else sorted(self.remote.objects)
        if gone and names:
            del self.remote.objects[names[gone % len(names)]]

    @rule(prompt=prompts, at=number, most=st.integers(0, 12))
    def bookkeeping(self, prompt: tuple[bytes, Prefix], at: int, most: int) -> None:
        """Remembering and forgetting; the same bytes again change nothing, and others are refused."""
        before = self.store
        tokens = np.array(prompt[1], np.int32)
        self.holder.update(lambda s: s.remember(prompt[0], tokens, kind=Kind.PROMPT_END, now=self.now))
        self.prompts |= {key: prompt for key in self.store.prompts.places if key not in before.prompts.places}
        key = self.choose_held(at)
        for tier, shelf in self.store.shelves.items():
            if key in shelf.states:
                self.put_again(key, tier)
        before = self.store
        after = self.holder.update(lambda store: store.forget(most))
        gone = set(before.prompts.places) - set(after.prompts.places)
        assert not gone & {key for key, _ in self.pins}
        assert not gone & {key for shelf in before.shelves.values() for key in shelf.states}

    def put_again(self, key: bytes, tier: Tier) -> None:
        namespace, tokens = self.prompts[key]
        run = rolling_model.run(rolling_model.start(namespace), tokens)
        state, pages = run.checkpoint(len(tokens), self.page)
        other = {**state, "recurrent": state["recurrent"][::-1].copy()}
        put = partial(self.store.put, namespace, tokens, kind=Kind.MARK, now=self.now, tier=tier)
        assert put(state, pages) is self.store
        with pytest.raises(Conflict):
            put(other, pages)
