"""Budgets: what is dropped for what, in memory and on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from transfer import DiskObjects, Item, MemoryObjects, Objects, Put
from transfer.object_file import header_nbytes
from transfer_site import TIMEOUT, content, item, read

UNIT = 1000
"""Bytes of an object, with its file's header."""


def sized(key: str, group: str | None = None, units: int = 1, on_disk: bool = True) -> Item:
    """An object that takes `units` of a budget."""
    return item(key, content(key, units * UNIT - on_disk * header_nbytes(key, group)), group)


@pytest.fixture(params=["memory", "disk"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Objects]]:
    """Opens a store of a budget in units."""
    stores: list[Objects] = []

    def opening(units: int) -> Objects:
        store = DiskObjects(tmp_path, units * UNIT, sync=False) if request.param == "disk" else None
        stores.append(store or MemoryObjects(units * UNIT))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def put(objects: Objects, *items: tuple[str, str | None, int]) -> list[Put]:
    """Puts objects of (key, group, units)."""
    on_disk = isinstance(objects, DiskObjects)
    return objects.put([sized(*one, on_disk) for one in items], TIMEOUT)


def held(objects: Objects, keys: str) -> str:
    """Which of these one-letter keys are there."""
    return "".join(key for key, there in zip(keys, objects.contains(list(keys), TIMEOUT)) if there)


def test_what_was_used_longest_ago_goes_first(opened: Callable[[int], Objects]) -> None:
    objects = opened(3)
    for key in "abc":
        assert put(objects, (key, None, 1)) == [Put.STORED]
    assert read(objects, "a") is not None
    assert put(objects, ("b", None, 1)) == [Put.HELD]  # held counts as used
    assert objects.contains(["c"], TIMEOUT) == [True]  # asking does not
    assert put(objects, ("d", None, 1)) == [Put.STORED]
    assert held(objects, "abcd") == "abd"
    assert put(objects, ("e", None, 2)) == [Put.STORED]
    assert held(objects, "abcde") == "de"


def test_a_group_goes_as_a_whole_and_with_the_use_of_any_member(opened: Callable[[int], Objects]) -> None:
    objects = opened(6)
    put(objects, ("a", "one", 1), ("b", "one", 1), ("c", "one", 1))
    put(objects, ("d", "two", 1), ("e", "two", 1), ("f", None, 1))
    assert read(objects, "b") is not None
    assert put(objects, ("g", None, 1)) == [Put.STORED]
    assert held(objects, "abcdefg") == "abcfg"
    put(objects, ("h", None, 2))
    assert held(objects, "abcdefgh") == "abcgh"
    put(objects, ("i", None, 1))
    assert held(objects, "abcdefghi") == "ghi"
    counted = objects.counters().operations["evict", "evicted"]
    assert counted.objects == 6 and counted.nbytes >= 5 * UNIT


def test_a_group_is_no_object_of_its_name(opened: Callable[[int], Objects]) -> None:
    objects = opened(3)
    put(objects, ("a", None, 1))
    put(objects, ("b", "a", 1), ("c", "a", 1))
    put(objects, ("d", None, 1))
    assert held(objects, "abcd") == "bcd"


def test_a_batch_drops_none_of_its_own(opened: Callable[[int], Objects]) -> None:
    objects = opened(3)
    put(objects, ("a", None, 1))
    puts = put(objects, ("b", None, 1), ("c", "g", 1), ("d", None, 1), ("e", "g", 1))
    assert puts == [Put.STORED, Put.STORED, Put.STORED, Put.FULL]
    assert held(objects, "abcde") == "bcd"
    assert objects.counters().dropped == 1


def test_a_group_is_not_dropped_for_its_own(opened: Callable[[int], Objects]) -> None:
    objects = opened(2)
    put(objects, ("a", "g", 1))
    put(objects, ("b", "g", 1))
    assert put(objects, ("c", "g", 1)) == [Put.FULL]
    assert held(objects, "abc") == "ab"


def test_nothing_is_dropped_in_vain(opened: Callable[[int], Objects]) -> None:
    objects = opened(3)
    put(objects, ("a", None, 1), ("b", None, 1), ("c", None, 1))
    assert put(objects, ("d", None, 4)) == [Put.FULL]
    assert held(objects, "abcd") == "abc"


def test_the_whole_budget_can_be_used_and_no_byte_more(opened: Callable[[int], Objects]) -> None:
    objects = opened(2)
    assert put(objects, ("a", None, 2)) == [Put.STORED]
    one = sized("b", None, 2, isinstance(objects, DiskObjects))
    more = Item("b", [*one.pieces, np.zeros(1, np.uint8)])
    assert objects.put([more], TIMEOUT) == [Put.FULL]
    assert objects.put([one], TIMEOUT) == [Put.STORED]
    assert held(objects, "ab") == "b"


def test_removing_makes_room(opened: Callable[[int], Objects]) -> None:
    objects = opened(2)
    put(objects, ("a", "g", 1), ("b", "g", 1))
    assert objects.remove(["a"], TIMEOUT) == [True]
    assert put(objects, ("c", "g", 1)) == [Put.STORED]
    assert held(objects, "abc") == "bc"


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_is_positive(tmp_path: Path, budget: int) -> None:
    for opening in (lambda: MemoryObjects(budget), lambda: DiskObjects(tmp_path, budget)):
        with pytest.raises(ValueError, match=f"budget_nbytes={budget}"):
            opening()
    DiskObjects(tmp_path, 1).close()  # the folder is free


class NaiveLedger:
    """Groups in a list, the one used longest ago first."""

    def __init__(self, budget: int) -> None:
        self.budget, self.groups = budget, []

    def use(self, group: str) -> None:
        self.groups.sort(key=lambda one: one[0] == group)

    def sizes(self) -> dict[str, int]:
        return {key: size for _, keys in self.groups for key, size in keys.items()}

    def put(self, key: str, group: str, size: int) -> Put:
        held = {key: name for name, keys in self.groups for key in keys}
        if key in held:
            self.use(held[key])
            return Put.HELD if self.sizes()[key] == size else Put.CONFLICT
        own = next((keys for name, keys in self.groups if name == group), {})
        if sum(own.values()) + size > self.budget:
            return Put.FULL
        while sum(self.sizes().values()) + size > self.budget:
            self.groups.remove(next(one for one in self.groups if one[0] != group))
        self.groups = [one for one in self.groups if one[0] != group] + [(group, own | {key: size})]
        return Put.STORED

    def get(self, key: str) -> bool:
        group = next((name for name, keys in self.groups if key in keys), None)
        if group is not None:
            self.use(group)
        return group is not None

    def remove(self, key: str) -> None:
        for _, keys in self.groups:
            keys.pop(key, None)
        self.groups = [one for one in self.groups if one[1]]


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_are_those_of_the_naive_ledger(seed: int) -> None:
    rng = np.random.default_rng(seed)
    objects, naive = MemoryObjects(100), NaiveLedger(100)
    for _ in range(600):
        key, group = f"k{rng.integers(30)}", f"g{rng.integers(8)}"
        if (action := rng.random()) < 0.6:
            size = int(rng.integers(1, 40)) if rng.random() < 0.9 else 101
            got = objects.put([item(key, bytes(size), group)], TIMEOUT)
            assert got == [naive.put(key, group, size)]
        elif action < 0.9:
            assert (read(objects, key) is not None) == naive.get(key)
        else:
            assert objects.remove([key], TIMEOUT) == [True]
            naive.remove(key)
        keys = [f"k{i}" for i in range(30)]
        assert objects.contains(keys, TIMEOUT) == [key in naive.sizes() for key in keys]


def test_files_are_never_above_the_budget(tmp_path: Path) -> None:
    """Four threads put and remove while another one adds up the lengths of all files."""
    budget, most, stop = 200_000, [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            total = 0
            for path in [*tmp_path.glob("objects/*/*"), *tmp_path.glob("writing/*")]:
                try:
                    total += path.stat().st_size
                except FileNotFoundError:  # then not all were there at one time
                    total = 0
                    break
            most[0] = max(most[0], total)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for i in range(60):
            nbytes = int(rng.integers(1, 90_000))
            [put] = objects.put([item(f"{seed}-{i}", bytes(nbytes), f"g{rng.integers(5)}")], TIMEOUT)
            assert put in (Put.STORED, Put.FULL)

    with DiskObjects(tmp_path, budget, sync=False) as objects:
        watcher = threading.Thread(target=watch)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in (watcher, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        watcher.join()
        assert objects.counters().operations["evict", "evicted"].objects > 20
    assert budget // 2 < most[0] <= budget
