"""Objects that more than one library call writes: every byte in its place, one copy ahead, and whole or not at all."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from time import monotonic, sleep

import numpy as np
import pytest

from mooncake_fake import FakeStore, Open, codes, opening, outcomes, random_bytes
from transfer import Bytes, Item, Put
from transfer.mooncake import puts, strides
from transfer.mooncake.objects import logger

SOON, LONG = 0.15, 20.0
STAGED, STRAIGHT = 1000, 5000


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def opened(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """With strides and pieces of few bytes."""
    monkeypatch.setattr(strides, "STAGED", STAGED)
    monkeypatch.setattr(puts, "STRAIGHT", STRAIGHT)
    with opening(store) as opened:
        yield opened


def small(key: str, count: int, nbytes: int = 400) -> Item:
    """An object of small pieces."""
    return Item(key, [random_bytes(nbytes, i) for i in range(count)])


def value(item: Item) -> bytes:
    return b"".join(piece.tobytes() for piece in item.pieces)


class Stages:
    """Counts in `puts.stage` what was copied, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = threading.Semaphore(0)
        self.count, self.fails_at = 0, -1
        self.rooms: list[int] = []
        self._stage = puts.stage
        monkeypatch.setattr(puts, "stage", self)

    def __call__(self, stride: list[strides.Span], room: Bytes) -> dict[int, strides.Runs]:
        if self.count == self.fails_at:
            raise MemoryError
        runs = self._stage(stride, room)
        self.count += 1
        self.rooms.append(room.ctypes.data)
        self.done.release()
        return runs


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize(
    "sizes",
    [[999], [1000], [1001], [3001], [400, 600, 1], [400] * 12, [0, 7, STRAIGHT, 999, 2, STRAIGHT + 3, 2500]],
    ids=str,
)
def test_every_byte_of_every_object_arrives_in_order(
    store: FakeStore, opened: Open, protocol: str, sizes: list[int]
) -> None:
    store.rdma = protocol == "rdma"
    items = [Item(f"k{i}", [random_bytes(n, n + i) for n in np.roll(sizes, i)]) for i in range(3)]
    objects = opened(protocol=protocol)
    assert objects.put(items, LONG) == [Put.STORED] * 3
    assert [store.values[item.key] for item in items] == [value(item) for item in items]
    copied = 3 * sum(n for n in sizes if n < STRAIGHT or store.rdma)
    assert objects.counters().copied == copied
    assert sum(method == "put" for method, _ in store.batches) == -(-copied // STAGED)
    assert len(store.registered) <= 2  # however large the objects are


def test_what_is_not_copied_is_one_call(store: FakeStore, opened: Open) -> None:
    objects, item = opened(), Item("k", [random_bytes(STRAIGHT, i) for i in range(3)])
    assert objects.put([item], LONG) == [Put.STORED] and store.values["k"] == value(item)
    assert store.asked.count(("put", "k")) == 1 and not store.registered
    copied = Item("l", [*item.pieces, random_bytes(STAGED), *item.pieces])
    assert objects.put([copied], LONG) == [Put.STORED] and store.values["l"] == value(copied)
    assert store.asked.count(("put", "l")) == 1  # what is not copied takes nothing of a stride


def test_one_stride_is_copied_while_another_is_sent_and_no_more(
    store: FakeStore, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being sent is not written to."""
    stages, item, objects = Stages(monkeypatch), small("k", 10), opened()
    store.hang_at = ("put", "k")
    put = threading.Thread(target=objects.put, args=([item], LONG))
    put.start()
    assert store.waiting.acquire(timeout=LONG) and stages.done.acquire(timeout=LONG)
    assert stages.done.acquire(timeout=LONG)  # the second one, while the first is sent
    assert not stages.done.acquire(timeout=0.05)
    store.let_go.set()
    put.join(LONG)
    assert store.values["k"] == value(item)
    assert stages.rooms == [stages.rooms[0], stages.rooms[1]] * 2 and len(set(stages.rooms)) == 2


def test_what_fails_in_the_middle_is_not_sent_on_and_leaves_nothing(store: FakeStore, opened: Open) -> None:
    """The other object of the call is stored, and the memory is used again."""
    objects = opened(tries=1)
    items = [small("whole", 1), small("broken", 9), small("last", 1)]
    store.codes["put"] = codes(0, 0, -800)
    assert objects.put(items, LONG) == [Put.STORED, Put.FAILED, Put.STORED]
    assert outcomes(objects.counters(), "put") == {"stored": 2, "transfer": 1}
    assert store.asked.count(("put", "broken")) == 2
    assert store.values == {item.key: value(item) for item in items if item.key != "broken"}
    assert not store.sessions
    registered = dict(store.registered)
    assert objects.put([items[1]], LONG) == [Put.STORED] and store.values["broken"] == value(items[1])
    assert store.registered == registered


def test_what_fails_in_the_middle_is_sent_again_from_its_begin(store: FakeStore, opened: Open) -> None:
    objects, item = opened(), small("k", 9)
    store.codes["put"] = codes(0, 0, -800)
    assert objects.put([item], LONG) == [Put.STORED] and store.values["k"] == value(item)
    assert objects.counters().retries == 1 and objects.counters().copied == 2 * 3600


def test_a_part_that_was_written_of_a_stride_is_no_put(store: FakeStore, opened: Open) -> None:
    store.codes["put"] = codes(0, 999)
    assert opened().put([small("k", 9)], LONG) == [Put.FAILED] and not store.values
    assert store.asked.count(("put", "k")) == 2


def test_no_stride_is_sent_after_the_deadline(store: FakeStore, opened: Open) -> None:
    objects = opened(close_s=LONG)
    store.hang_at = ("put", "k")
    start = monotonic()
    assert objects.put([small("k", 9)], SOON) == [Put.LATE] and monotonic() - start < 10 * SOON
    store.let_go.set()
    while store.sessions and monotonic() - start < LONG:
        sleep(0.01)
    assert store.asked.count(("put", "k")) == 1 and not store.values and not store.sessions
    assert objects.put([small("k", 9)], LONG) == [Put.STORED]  # the name is free


def test_a_put_that_close_ends_is_late(store: FakeStore, opened: Open) -> None:
    objects, ended = opened(close_s=LONG), []
    store.hang_at = ("put", "k")
    put = threading.Thread(target=lambda: ended.extend(objects.put([small("k", 9)], LONG)))
    put.start()
    assert store.waiting.acquire(timeout=LONG)
    closing = threading.Thread(target=objects.close)
    closing.start()
    while not objects._threads.closing.is_set():
        sleep(0.01)
    store.let_go.set()
    put.join(LONG)
    closing.join(LONG)
    assert ended == [Put.LATE] and not store.values and not store.sessions and store.closed == 1


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_copy_that_fails_is_a_miss_and_leaves_nothing(
    store: FakeStore, opened: Open, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    stages, objects, item = Stages(monkeypatch), opened(), small("k", 10)
    stages.fails_at = at
    monkeypatch.setattr(
        logger, "exception", lambda _: None
    )  # pytest would keep it, and what its traceback holds
    assert objects.put([item], LONG) == [Put.FAILED]
    assert outcomes(objects.counters(), "put") == {"broken": 1}
    assert not store.values and not store.sessions
    gc.collect()
    stages.fails_at = -1
    registered = dict(store.registered)
    assert objects.put([item], LONG) == [Put.STORED] and store.values["k"] == value(item)
    assert store.registered == registered  # no memory was lost


def test_pieces_are_let_go_when_a_put_has_ended(opened: Open) -> None:
    """At once: not when garbage is collected."""
    objects, pieces = opened(), [random_bytes(400, i) for i in range(9)]
    alive = [weakref.ref(piece) for piece in pieces]
    gc.collect()
    gc.disable()
    try:
        assert objects.put([Item("k", pieces)], LONG) == [Put.STORED]
        pieces.clear()
        end = monotonic() + LONG
        while any(one() is not None for one in alive) and monotonic() < end:
            sleep(0.01)  # the worker's last steps
        assert not any(one() is not None for one in alive)
    finally:
        gc.enable()
