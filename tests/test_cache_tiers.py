"""Bytes between tiers, and one store for many threads."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rolling_model
from cache.errors import Broken
from cache.holder import Holder
from cache.keys import KeyChain
from cache.payload import Payload, Sized, nbytes
from cache.plan import Limits, ResumePlan
from cache.retention.protocol import Kind
from cache.store import Store
from cache.tier import ALL_TIERS, Tier, fastest
from cache.tiers import InMemory, Loaded, demote, load, make_room, promote
from cache_site import NAMESPACE, text
from oldest_first import OldestFirst

PAGE, LENGTH = 16, 100
TOKENS = text(LENGTH)
RUN = rolling_model.run(rolling_model.start(NAMESPACE), TOKENS)
CHECKPOINT_NBYTES = rolling_model.STATE_NBYTES + LENGTH * rolling_model.ROW_NBYTES


class Disk:
    """Files that are dictionaries, until one is told to break."""

    def __init__(self) -> None:
        self.files: dict[str, Payload] = {}
        self.writes_left = 10**9

    def write(self, name: str, payload: Payload) -> Payload:
        if not self.writes_left:
            raise OSError("no space left on device")
        self.writes_left -= 1
        self.files[name] = payload
        return Sized(nbytes(payload))

    def read(self, name: str, kept: Payload | None) -> Payload:
        if name not in self.files:
            raise OSError("no such file")
        return self.files[name]


class Instance:
    """A holder with one checkpoint of LENGTH tokens on the device, and storage for three tiers."""

    def __init__(self, device: int = 10**6, host: int = 10**6, disk: int = 10**6) -> None:
        budgets = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
        sizes = {"state_nbytes": rolling_model.STATE_NBYTES, "row_nbytes": rolling_model.ROW_NBYTES}
        self.holder = Holder(Store.empty(budgets, OldestFirst(), page=PAGE, share=1.0, **sizes))  # type: ignore[arg-type]
        self.disk = Disk()
        self.storages = {Tier.DEVICE: InMemory(), Tier.HOST: InMemory(), Tier.DISK: self.disk}
        self.key = self.put(TOKENS, RUN)

    def put(self, tokens: np.ndarray, run: rolling_model.Run) -> bytes:
        state, pages = run.checkpoint(len(tokens), PAGE)
        self.holder.update(lambda s: s.put(NAMESPACE, tokens, state, pages, kind=Kind.MARK, now=0.0))
        return KeyChain.start(NAMESPACE, PAGE).extend(tokens).key

    def tiers(self, key: bytes) -> list[Tier]:
        return [tier for tier, shelf in sorted(self.holder.store.shelves.items()) if key in shelf.states]

    def plan(self) -> ResumePlan:
        prompt = np.append(TOKENS, TOKENS[:1])
        seen = self.holder.store.match(NAMESPACE, prompt)
        return self.holder.store.plan(seen, len(prompt), Limits())

    def load(self) -> Loaded:
        return load(
            self.holder.store, self.plan(), KeyChain.start(NAMESPACE, PAGE).extend(TOKENS), self.storages
        )

    def drop(self, tier: Tier) -> None:
        self.holder.update(lambda store: store.drop(self.key, tier, 0.0))


def is_whole(loaded: Loaded) -> bool:
    resumed = rolling_model.resumed(LENGTH, loaded.state, loaded.pages)
    return rolling_model.run(resumed, [7]).answer == rolling_model.run(RUN, [7]).answer


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK], ids=lambda tier: tier.name.lower())
def test_a_checkpoint_comes_back_whole_from_each_tier(tier: Tier) -> None:
    site = Instance()
    for slower in range(tier):
        assert demote(site.holder, site.key, Tier(slower), site.storages, 1.0)
    assert site.tiers(site.key) == [tier]
    assert site.plan().state == tier
    assert is_whole(site.load())
    assert promote(site.holder, site.key, Tier.DEVICE, site.storages, 2.0)
    assert site.tiers(site.key) == sorted({Tier.DEVICE, tier})
    assert is_whole(site.load())


@pytest.mark.parametrize("broken", range(1 + LENGTH // PAGE))
def test_a_part_that_cannot_be_read_is_a_miss_of_the_whole(broken: int) -> None:
    """The k-th object of n, for all k: nothing is returned, the checkpoint is dropped, and nothing else is left."""
    site = Instance()
    assert demote(site.holder, site.key, Tier.DEVICE, site.storages, 1.0)
    assert demote(site.holder, site.key, Tier.HOST, site.storages, 1.0)
    del site.disk.files[sorted(site.disk.files)[broken]]
    with pytest.raises(Broken, match="tier disk: no such file; it is dropped") as caught:
        site.load()
    store = site.holder.update(lambda s: s.lose(caught.value.key, Tier.DISK, 2.0, caught.value.page))
    assert site.plan().boundary == 0
    assert (store.shelves[Tier.DISK].nbytes, store.counts.lost) == (0, 1)
    assert site.key in store.prompts.places


@pytest.mark.parametrize("writes", range(1 + LENGTH // PAGE))
def test_a_copy_that_cannot_be_finished_leaves_nothing(writes: int) -> None:
    """The disk is full after some writes."""
    site = Instance(host=0)
    site.disk.writes_left = writes
    before = site.holder.store.shelves[Tier.DISK]
    assert not promote(site.holder, site.key, Tier.DISK, site.storages, 1.0)
    assert site.holder.store.shelves[Tier.DISK] == before
    assert site.tiers(site.key) == [Tier.DEVICE]


def test_a_broken_copy_is_dropped_and_a_slower_one_is_used() -> None:
    site = Instance()
    assert promote(site.holder, site.key, Tier.DISK, site.storages, 1.0)
    flaky = site.storages[Tier.HOST] = Disk()  # type: ignore[assignment]
    assert promote(site.holder, site.key, Tier.HOST, site.storages, 1.0)
    site.drop(Tier.DEVICE)
    assert site.tiers(site.key) == [Tier.HOST, Tier.DISK]
    flaky.files.clear()
    assert promote(site.holder, site.key, Tier.DEVICE, site.storages, 2.0)
    assert site.tiers(site.key) == [Tier.DEVICE, Tier.DISK]
    assert is_whole(site.load())


def test_a_page_that_is_lost_takes_all_that_need_it_and_no_others() -> None:
    site = Instance()
    longer = np.append(TOKENS, text(40, 1))
    other = np.append(TOKENS[:40], text(40, 2))
    keys = [site.key] + [
        site.put(tokens, rolling_model.run(rolling_model.start(NAMESPACE), tokens))
        for tokens in (longer, other)
    ]
    name = KeyChain.start(NAMESPACE, PAGE).extend(TOKENS).added[4]
    store = site.holder.store.pin(site.key).lose(site.key, Tier.DEVICE, 1.0, name)
    assert set(store.shelves[Tier.DEVICE].states) == {keys[2]}
    assert len(store.shelves[Tier.DEVICE].pages) == 5
    assert store.counts.lost == 2


def test_demotion_comes_before_dropping_and_skips_full_tiers() -> None:
    site = Instance(device=CHECKPOINT_NBYTES, host=10, disk=10**6)
    assert make_room(site.holder, Tier.DEVICE, 1, site.storages, 1.0)
    assert site.tiers(site.key) == [Tier.DISK]
    site.disk.writes_left = 0
    second = text(LENGTH, 5)
    key = site.put(second, rolling_model.run(rolling_model.start(NAMESPACE), second))
    assert not demote(site.holder, key, Tier.DEVICE, site.storages, 1.0)
    assert site.tiers(key) == []


def test_a_tier_that_does_not_hold_a_checkpoint_cannot_demote_it() -> None:
    site = Instance()
    assert not demote(site.holder, site.key, Tier.HOST, site.storages, 1.0)
    assert site.tiers(site.key) == [Tier.DEVICE]
    assert promote(site.holder, site.key, Tier.DISK, site.storages, 1.0)
    assert demote(site.holder, site.key, Tier.HOST, site.storages, 1.0)
    assert site.tiers(site.key) == [Tier.DEVICE, Tier.DISK]


def test_no_room_is_made_from_what_is_pinned() -> None:
    site = Instance(device=CHECKPOINT_NBYTES)
    site.holder.update(lambda store: store.pin(site.key))
    assert not make_room(site.holder, Tier.DEVICE, 1, site.storages, 1.0)
    assert make_room(site.holder, Tier.DEVICE, 0, site.storages, 1.0)
    assert site.tiers(site.key) == [Tier.DEVICE]


def test_arrays_are_converted_on_their_way() -> None:
    def to_host(payload: Payload) -> Any:
        return {name: np.asarray(array) for name, array in payload.items()}  # type: ignore[union-attr]

    site = Instance()
    site.storages[Tier.HOST] = InMemory(to_host)
    state, page = {"s": jnp.arange(3.0)}, {"l": jnp.ones((PAGE, 2))}
    tokens = text(PAGE, 9)
    site.holder.update(lambda s: s.put(NAMESPACE, tokens, state, [page], kind=Kind.MARK, now=0.0))
    key = KeyChain.start(NAMESPACE, PAGE).extend(tokens).key
    assert promote(site.holder, key, Tier.HOST, site.storages, 0.0)
    kept: Any = site.holder.store.shelves[Tier.HOST].states[key]
    assert isinstance(kept["s"], np.ndarray)
    assert np.array_equal(kept["s"], state["s"])


class Slots:
    """Pages of a pool, which come free when nobody holds them any more."""

    nbytes = 16

    def __init__(self, free: list[int], slot: int) -> None:
        weakref.finalize(self, free.append, slot)


def test_what_stands_for_memory_elsewhere_gives_it_back_with_the_last_version() -> None:
    free: list[int] = []
    site = Instance()
    tokens = text(PAGE, 9)
    site.holder.update(
        lambda s: s.put(NAMESPACE, tokens, Sized(1), [Slots(free, 3)], kind=Kind.MARK, now=0.0)
    )
    old = site.holder.store
    key = KeyChain.start(NAMESPACE, PAGE).extend(tokens).key
    site.holder.update(lambda store: store.drop(key, Tier.DEVICE, 0.0))
    assert free == []
    del old
    assert free == [3]


def test_nothing_to_load_is_an_error() -> None:
    site = Instance()
    site.drop(Tier.DEVICE)
    with pytest.raises(ValueError, match="nothing to load at 0 with a chain of 100 tokens"):
        site.load()


def test_the_fastest_of_a_set() -> None:
    assert [fastest(tiers) for tiers in (1, 2, 3, 6, 8, ALL_TIERS)] == [0, 1, 0, 1, 3, 0]
    assert sum(tier.bit for tier in Tier) == ALL_TIERS


def test_many_threads_lose_no_change() -> None:
    site = Instance(device=10**9)

    def put(store: Store, tokens: np.ndarray) -> Store:
        pages = [Sized(1)] * (len(tokens) // PAGE)
        return store.put(NAMESPACE, tokens, Sized(1), pages, kind=Kind.MARK, now=0.0)

    def work(seed: int) -> None:
        for number in range(25):
            tokens = np.append(TOKENS[: 10 * seed], text(20, 100 * seed + number + 1))
            site.holder.update(partial(put, tokens=tokens))
            store = site.holder.store
            seen = store.match(NAMESPACE, np.append(tokens, 1))
            assert seen.boundaries[-1].boundary == len(tokens)
            assert store.plan(seen, len(tokens) + 1, Limits()).boundary == len(tokens)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert site.holder.store.counts.puts == 1 + 8 * 25
    assert site.holder.store.stats().remembered == 1 + 8 * 25


def test_a_change_that_fails_changes_nothing() -> None:
    site = Instance()
    before = site.holder.store
    with pytest.raises(ZeroDivisionError):
        site.holder.update(lambda store: 1 // 0)  # type: ignore[arg-type, return-value]
    assert site.holder.store is before
    assert site.holder.update(lambda store: store) is before
