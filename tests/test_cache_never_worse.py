"""Turning a feature on never lowers reuse at the same budget on the same requests: where that holds for each request,
where for many histories together, and what the exceptions look like.

With room for what it adds, no request resumes from fewer tokens than without it. Where room is short, what it adds
takes the place of something else: a single history may lose, many together do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from cache.ahead import ahead
from cache.holder import Holder
from cache.payload import Sized
from cache.placement import place
from cache.plan import Limits
from cache.retention import Creation, Kind, policy
from cache.store import Store
from cache.tier import Tier
from cache.tiers import InMemory, Storages, make_room, promote
from cache.tokens import Tokens
from cache_site import NAMESPACE, ROW, STATE, Site, join, text

PAGE = 64
AMPLE = 10**9
STORAGES: Storages = {tier: InMemory() for tier in Tier}
HISTORIES = 5
WITHOUT = {
    "branch-points": frozenset({Kind.BRANCH}),
    "missing-ones": frozenset({Kind.MISSING}),
    "both": frozenset({Kind.BRANCH, Kind.MISSING}),
    "before-the-end": frozenset({Kind.BEFORE_END}),
}
POLICIES = ["lru", "ours"]
SHORT = 10_000
"""Bytes in which ten checkpoints have room: about a tenth of what a history makes."""


class Request(NamedTuple):
    """A prompt, and when it came."""

    tokens: Tokens
    now: float


def history(seed: int, requests: int = 40, conversations: int = 12) -> Iterator[Request]:
    """Conversations that go on, are edited, come again or begin with one of three system prompts, interleaved."""
    rng, now, fresh = np.random.default_rng(seed), 0.0, 1000 * (seed + 1)
    systems = [text(int(rng.integers(100, 800)), at) for at in range(3)]
    texts: list[Tokens] = []
    for at in range(requests):
        now += float(rng.exponential(10.0))
        new = text(int(rng.integers(30, 600)), fresh + at)
        if len(texts) < conversations and (not texts or rng.random() < 0.3):
            texts.append(join(systems[rng.integers(3)], new))
            yield Request(texts[-1], now)
            continue
        which = int(rng.integers(len(texts)))
        kind = rng.random()
        if kind < 0.6:
            texts[which] = join(texts[which], new)
        elif kind < 0.8:
            texts[which] = join(texts[which][: rng.integers(1, len(texts[which]))], new)
        yield Request(texts[which], now)


@dataclass(frozen=True, kw_only=True)
class Features:
    """What is turned on.

    Attributes:
        policy: by its name.
        device: bytes of the device tier.
        host: bytes of the host tier; 0 for none.
        state: bytes of a recurrent state, smaller where it is compressed.
        without: kinds of checkpoints that are not made.
        interval: tokens between checkpoints that are made at intervals; 0 for none.
        promote: whether a hit in the host is copied to the device.
        ahead: bytes that are copied there before each request, of what is expected soonest.
    """

    policy: str = "lru"
    device: int = AMPLE
    host: int = 0
    state: int = STATE
    without: frozenset[Kind] = frozenset()
    interval: int = 0
    promote: bool = False
    ahead: int = 0


class Replay:
    """Serves prompts one after another."""

    def __init__(self, features: Features) -> None:
        self.features = features
        start = policy(features.policy)
        budgets = {Tier.DEVICE: features.device}
        if features.host:
            budgets[Tier.HOST] = features.host
        sizes = {"state_nbytes": features.state, "row_nbytes": ROW, "page": PAGE}
        self.holder = Holder(Store.empty(budgets, start, share=1.0, **sizes))
        kinds = (start.creation.kinds - features.without) | ({Kind.INTERVAL} if features.interval else set())
        self.kinds = frozenset(kinds)

    @property
    def store(self) -> Store:
        return self.holder.store

    def serve(self, request: Request) -> int:
        """How many tokens of a prompt were not computed again."""
        tokens, now = request
        self.bring(now)
        seen, limits = self.store.match(NAMESPACE, tokens), Limits()
        plan = self.store.plan(seen, len(tokens), limits)
        key = plan.key
        self.holder.update(lambda store: store.used(seen, key, now))
        if key is not None:
            self.holder.update(lambda store: store.pin(key))
            if self.features.promote:
                self.fetch(key, now)
        before_end = self.store.shelves[Tier.DEVICE].policy.creation.before_end
        creation = Creation(kinds=self.kinds, interval=self.features.interval, before_end=before_end)
        for boundary, kind in reversed(place(plan, len(tokens), limits, creation)):
            self.put(tokens[:boundary], kind, now)
        if key is not None:
            self.holder.update(lambda store: store.unpin(key))
        return plan.boundary

    def put(self, tokens: Tokens, kind: Kind, now: float) -> None:
        pages = [Sized(PAGE * ROW)] * (len(tokens) // PAGE)
        state = Sized(self.features.state)
        if self.features.host:
            self.holder.update(lambda store: store.remember(NAMESPACE, tokens, kind=kind, now=now))
            key = self.store.match(NAMESPACE, tokens).boundaries[-1].key
            assert key is not None
            self.room(key, now)
        self.holder.update(lambda store: store.put(NAMESPACE, tokens, state, pages, kind=kind, now=now))

    def room(self, key: bytes, now: float) -> None:
        """Demotes for a checkpoint what the device would drop for it."""
        lacks = self.store.prompts.lacks(key, Tier.DEVICE)
        size = self.features.state + len(lacks) * PAGE * ROW
        whole = self.features.state + self.store.prompts.node(key).stop // PAGE * PAGE * ROW
        if whole <= self.features.device:
            make_room(self.holder, Tier.DEVICE, size, STORAGES, now)

    def fetch(self, key: bytes, now: float) -> None:
        if key in self.store.prompts.places and key not in self.store.shelves[Tier.DEVICE].states:
            self.room(key, now)
            promote(self.holder, key, Tier.DEVICE, STORAGES, now)

    def bring(self, now: float) -> None:
        if self.features.ahead:
            for each in ahead(self.store, Tier.DEVICE, self.features.ahead, now):
                self.fetch(each.key, now)


@cache
def reused(features: Features) -> tuple[np.ndarray, ...]:
    """Tokens not computed again, by request, of each history."""
    replays = [(Replay(features), history(seed)) for seed in range(HISTORIES)]
    return tuple(np.array([replay.serve(each) for each in requests]) for replay, requests in replays)


def gains(off: Features, on: Features) -> np.ndarray:
    """Tokens that each history reuses more with a feature."""
    return np.array([b.sum() - a.sum() for a, b in zip(reused(off), reused(on))])


def assert_no_request_loses(off: Features, on: Features) -> None:
    for without, with_it in zip(reused(off), reused(on)):
        assert (with_it >= without).all()


# with room: every request


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kinds", WITHOUT.values(), ids=list(WITHOUT))
def test_with_room_no_request_loses_by_more_checkpoints(name: str, kinds: frozenset[Kind]) -> None:
    on = Features(policy=name)
    assert_no_request_loses(replace(on, without=kinds), on)
    assert_no_request_loses(replace(on, without=kinds), replace(on, interval=512))


@pytest.mark.parametrize("name", POLICIES)
def test_with_room_compression_changes_no_request(name: str) -> None:
    off = Features(policy=name)
    assert_no_request_loses(off, replace(off, state=STATE // 4))
    assert not gains(off, replace(off, state=STATE // 4)).any()


@pytest.mark.parametrize("name", POLICIES)
def test_with_room_in_a_slower_tier_no_request_loses(name: str) -> None:
    """A device that is short, alone, and before a host that is not; what the host holds is then brought back, on a hit
    and ahead of it."""
    device, ample = Features(policy=name, device=SHORT), Features(policy=name)
    host = replace(device, host=AMPLE)
    assert_no_request_loses(device, host)
    assert gains(device, host).min() > 0
    for on in (
        replace(host, promote=True),
        replace(host, ahead=5000),
        replace(host, promote=True, ahead=5000),
    ):
        assert_no_request_loses(host, on)
        assert_no_request_loses(ample, on)


# without: many histories together


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("budget", [SHORT, 25_000])
@pytest.mark.parametrize(
    "feature",
    [{"without": frozenset()}, {"state": STATE // 4}, {"host": 20_000}],
    ids=["branch-points", "compression", "host"],
)
def test_where_room_is_short_many_histories_together_gain(name: str, budget: int, feature: dict) -> None:
    off = Features(policy=name, device=budget)
    if "without" in feature:
        off = replace(off, without=WITHOUT["branch-points"])
    on = replace(off, **feature)
    assert gains(off, on).sum() > 0


def test_where_room_is_short_a_checkpoint_more_can_cost_a_history_another() -> None:
    """Room for two. The second prompt leaves the first after 320 of its 640 tokens; the checkpoint that is made there
    takes the place of the first prompt's end, and it is the first conversation that goes on."""

    def turns(without: frozenset[Kind]) -> list[int]:
        replay = Replay(Features(device=2 * STATE + 20 * 64, without=without | {Kind.MISSING}))
        first = text(650)
        second = join(first[:320], text(330, 1))
        prompts = [first, second, join(first, text(64, 2)), join(first[:320], text(330, 3))]
        return [replay.serve(Request(prompt, float(now))) for now, prompt in enumerate(prompts)]

    assert turns(WITHOUT["branch-points"]) == [0, 0, 640, 0]
    assert turns(frozenset()) == [0, 0, 320, 320]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("budget", [SHORT, 25_000])
def test_what_is_brought_back_costs_a_short_host_at_most_a_hundredth(name: str, budget: int) -> None:
    """A promotion demotes something, and what it leaves in the host is room only for what comes after that."""
    host = Features(policy=name, device=budget, host=20_000)
    total = sum(map(np.sum, reused(host)))
    for on in (replace(host, promote=True), replace(host, promote=True, ahead=5000)):
        assert gains(host, on).sum() > -0.01 * total


def test_copies_of_what_the_device_holds_leave_the_host_first() -> None:
    """Room in the host for three checkpoints of 640 tokens; the most recent one is brought to the device."""
    size = STATE + 640
    site = Site(budgets={Tier.DEVICE: AMPLE, Tier.HOST: 3 * size})
    keys = [site.put(text(640, seed), tier=Tier.HOST) for seed in range(3)]
    pages = dict.fromkeys(site.store.prompts.lacks(keys[2], Tier.DEVICE), Sized(64))
    site.store = site.store.copied(keys[2], Tier.DEVICE, Sized(STATE), pages, site.now)
    assert list(site.store.victims(Tier.HOST, size, site.now)) == [keys[2], keys[0], keys[1]]
    assert list(site.store.victims(Tier.DEVICE, size, site.now)) == [keys[2]]
    other = site.put(text(640, 5), tier=Tier.HOST)
    assert set(site.store.shelves[Tier.HOST].states) == {keys[0], keys[1], other}
    assert [site.plan(join(text(640, seed), text(9, 9))).boundary for seed in (0, 1, 2, 5)] == [640] * 4
    pinned = site.store.pin(keys[2]).evict(Tier.HOST, 1, site.now)
    assert set(pinned.shelves[Tier.HOST].states) == {keys[1], other}
