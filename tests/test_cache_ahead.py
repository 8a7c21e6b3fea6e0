"""Who is expected next, and what is brought to the device before they come."""

from __future__ import annotations

import numpy as np
import pytest

from cache import Holder, InMemory, Limits, Sized, Store, Tier, ahead, make_room, promote
from cache.retention import Kind, policy
from cache_site import NAMESPACE, text

STATE, ROW, PAGE = 1000, 1, 64
STORAGES = {tier: InMemory() for tier in Tier}
MEMORY = 10**9


class Chats:
    """Conversations whose turns come every 20 to 60 seconds until they end; the host holds every turn's end."""

    def __init__(self, name: str = "ours", device: int = MEMORY) -> None:
        budgets = {Tier.DEVICE: device, Tier.HOST: MEMORY}
        empty = Store.empty(budgets, policy(name), state_nbytes=STATE, row_nbytes=ROW, page=PAGE, share=1.0)
        self.holder, self.now = Holder(empty), 0.0
        self.last: dict[int, bytes] = {}
        self.turns: dict[int, int] = {}

    @property
    def store(self) -> Store:
        return self.holder.store

    def turn(self, chat: int, tier: Tier = Tier.HOST) -> None:
        count = self.turns[chat] = self.turns.get(chat, 0) + 1
        tokens = text(100 * 10, chat)[: 100 * count]
        seen = self.store.match(NAMESPACE, tokens)
        plan = self.store.plan(seen, len(tokens), Limits(grid=1))
        pages = [Sized(PAGE * ROW)] * (len(tokens) // PAGE)
        self.holder.update(lambda s: s.used(seen, plan.key, self.now))
        self.holder.update(
            lambda s: s.put(
                NAMESPACE, tokens, Sized(STATE), pages, kind=Kind.PROMPT_END, now=self.now, tier=tier
            )
        )
        key = self.store.match(NAMESPACE, tokens).boundaries[-1].key
        assert key is not None
        self.last[chat] = key

    def day(self, seed: int, chats: int = 20, turns: int = 6, look: int = 10**9) -> list[int]:
        """All of them; how many were expected sooner than the one that came, at later turns of chats from `look` on."""
        rng = np.random.default_rng(seed)
        times = sorted(
            (start + at, chat)
            for chat in range(chats)
            for start in [60.0 * chat]
            for at in np.cumsum([0.0, *rng.uniform(20, 60, turns - 1)])
        )
        places = []
        for at, chat in times:
            if chat >= look and chat in self.last:
                keys = [each.key for each in ahead(self.store, Tier.DEVICE, 20000, self.now)]
                places.append(keys.index(self.last[chat]))
            self.now = float(at)
            self.turn(chat)
        return places


def test_the_conversations_that_go_on_are_expected_before_those_that_ended() -> None:
    """Of 180 to 360 checkpoints, the one that is used next is always among the first few."""
    places = Chats().day(seed=1, chats=60, look=30)
    assert len(places) == 30 * 5
    assert max(places) < 8 and np.median(places) <= 1


def test_what_it_names_can_be_promoted_and_is_then_there() -> None:
    chats = Chats(device=5000)
    chats.day(seed=2, chats=10)
    named = ahead(chats.store, Tier.DEVICE, 4000, chats.now)
    assert 1 < len(named) < 5 and sum(each.nbytes for each in named) <= 4000
    assert [each.expected for each in named] == sorted((each.expected for each in named), reverse=True)
    for each in named:
        assert make_room(chats.holder, Tier.DEVICE, each.nbytes, STORAGES, chats.now)
        before = chats.store.shelves[Tier.DEVICE].nbytes
        assert promote(chats.holder, each.key, Tier.DEVICE, STORAGES, chats.now)
        assert chats.store.shelves[Tier.DEVICE].nbytes - before == each.nbytes
    held = chats.store.shelves[Tier.DEVICE].states
    assert all(each.key in held for each in named)
    assert not {each.key for each in ahead(chats.store, Tier.DEVICE, MEMORY, chats.now)} & set(held)


def test_only_what_is_expected_less_makes_room() -> None:
    """A full device gives up an ended conversation for one that goes on, and never the other way round."""
    chats = Chats(device=1650)
    chats.day(seed=3)
    for _ in range(3):
        chats.now += 40
        chats.turn(20)
    old, new = chats.last[0], chats.last[20]
    first = ahead(chats.store, Tier.DEVICE, MEMORY, chats.now)[0]
    assert first.key == new and 1 / 60 < first.expected < 1 / 20  # uses a second
    assert promote(chats.holder, old, Tier.DEVICE, STORAGES, chats.now)
    assert new in [each.key for each in ahead(chats.store, Tier.DEVICE, MEMORY, chats.now)]
    chats.holder.update(lambda s: s.drop(old, Tier.DEVICE, chats.now))
    assert promote(chats.holder, new, Tier.DEVICE, STORAGES, chats.now)
    assert ahead(chats.store, Tier.DEVICE, MEMORY, chats.now) == ()


def test_pages_that_are_there_are_not_moved() -> None:
    chats = Chats()
    chats.day(seed=3)
    for count in range(1, 4):
        chats.now += 40
        chats.turn(20)
        if count == 2:
            assert promote(chats.holder, chats.last[20], Tier.DEVICE, STORAGES, chats.now)
    first = ahead(chats.store, Tier.DEVICE, MEMORY, chats.now)[0]
    assert first.key == chats.last[20]
    assert first.nbytes == STATE + ROW * PAGE * (300 // PAGE - 200 // PAGE)


def test_what_is_pinned_makes_no_room() -> None:
    chats = Chats(device=1650)
    chats.day(seed=3)
    old = chats.last[0]
    assert promote(chats.holder, old, Tier.DEVICE, STORAGES, chats.now)
    assert ahead(chats.store, Tier.DEVICE, MEMORY, chats.now)
    chats.holder.update(lambda s: s.pin(old))
    assert not ahead(chats.store, Tier.DEVICE, MEMORY, chats.now)


@pytest.mark.parametrize("name", ["lru", "prompt_end"])
def test_a_policy_that_expects_nothing_names_nothing(name: str) -> None:
    chats = Chats(name)
    chats.turn(1)
    assert ahead(chats.store, Tier.DEVICE, MEMORY, chats.now) == ()
