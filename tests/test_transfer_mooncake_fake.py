"""MooncakeObjects over a store object that fails and lies on demand: every code's outcome, and where the bytes lie."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from time import monotonic

import numpy as np
import pytest

from mooncake_fake import FakeStore, Open, codes, item, opening, outcomes, random_bytes
from transfer import Item, Put, Read
from transfer.mooncake import call
from transfer.mooncake.codes import outcome
from transfer.mooncake.puts import STRAIGHT
from transfer.mooncake.strides import extend

SOON, LONG = 0.15, 20.0
MIB = 2**20


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def opened(store: FakeStore) -> Iterator[Open]:
    with opening(store) as opened:
        yield opened


PUT_CODES = {
    -200: (Put.FULL, "full", 3),
    -800: (Put.FAILED, "transfer", 3),
    -703: (Put.FAILED, "unfinished", 3),
    -600: (Put.FAILED, "refused", 1),
    -1: (Put.FAILED, "refused", 1),
    -101: (Put.FAILED, "refused", 1),
    -704: (Put.FAILED, "absent", 3),
    -706: (Put.FAILED, "leased", 1),
    -801: (Put.FAILED, "checksum", 1),
    -900: (Put.FAILED, "unreachable", 1),
    -901: (Put.FAILED, "unreachable", 1),
}


@pytest.mark.parametrize("code", PUT_CODES)
def test_a_put_that_always_fails_is_tried_so_often_and_then_dropped(
    store: FakeStore, opened: Open, code: int
) -> None:
    put, word, tries = PUT_CODES[code]
    store.always["put"] = code
    objects = opened(tries=3)
    assert objects.put([item()], LONG) == [put]
    counters = objects.counters()
    assert outcomes(counters, "put") == {word: 1}
    assert (counters.retries, counters.dropped) == (tries - 1, 1)
    assert store.asked.count(("put", "k")) == tries


@pytest.mark.parametrize("code", [-200, -800])
def test_a_put_that_fails_at_first_is_stored_in_the_end(store: FakeStore, opened: Open, code: int) -> None:
    store.codes["put"] = codes(0, code, code, code, 0)  # of two objects, the second and then that twice more
    objects = opened()
    assert objects.put([item("a"), item("b")], LONG) == [Put.STORED, Put.STORED]
    assert objects.counters().retries == 3 and objects.counters().dropped == 0
    assert store.asked.count(("put", "a")) == 1  # what was stored is not sent again


@pytest.mark.parametrize("code", [-1, -900, -901])
@pytest.mark.parametrize("method", ["start", "end", "get_size"])
def test_a_put_that_does_not_begin_or_end_or_is_not_verified_has_failed(
    store: FakeStore, opened: Open, method: str, code: int
) -> None:
    store.codes[method] = codes(code)
    objects = opened()
    assert objects.put([item("a"), item("b")], LONG) == [Put.FAILED, Put.STORED]
    assert outcomes(objects.counters(), "put") == {outcome(code): 1, "stored": 1}
    assert ("a" in store.values) == (method == "get_size") and not store.sessions


def test_no_room_is_known_at_the_start(store: FakeStore, opened: Open) -> None:
    store.codes["start"] = codes(-200, 0, -200, 0)
    objects = opened()
    assert objects.put([item("a"), item("b")], LONG) == [Put.STORED, Put.STORED]
    assert objects.counters().retries == 2 and store.asked.count(("put", "a")) == 1


def test_a_put_that_was_swallowed_is_no_put(store: FakeStore, opened: Open) -> None:
    objects = opened(tries=3)
    store.swallow = 2
    assert objects.put([item("a")], LONG) == [Put.STORED]  # at the third try
    store.swallow = 3
    assert objects.put([item()], LONG) == [Put.FAILED]
    assert outcomes(objects.counters(), "put") == {"stored": 1, "absent": 1}


def test_a_part_that_was_written_is_no_put(store: FakeStore, opened: Open) -> None:
    store.codes["put"] = codes(99)
    objects = opened()
    assert objects.put([item()], LONG) == [Put.FAILED] and not store.values
    assert outcomes(objects.counters(), "put") == {"refused": 1}


def test_an_older_object_stays(store: FakeStore, opened: Open) -> None:
    objects = opened()
    old = item()
    assert objects.put([old], LONG) == [Put.STORED]
    assert objects.put([item(seed=1), item("new")], LONG) == [Put.HELD, Put.STORED]
    assert objects.put([item(nbytes=101)], LONG) == [Put.CONFLICT]
    assert store.values["k"] == old.pieces[0].tobytes() and store.asked.count(("put", "k")) == 1


@pytest.mark.parametrize("dies", [False, True], ids=["ends", "dies"])
def test_an_object_that_another_writer_has_begun_is_waited_for(
    store: FakeStore, opened: Open, dies: bool
) -> None:
    objects, other = opened(tries=3), item(seed=1).pieces[0].tobytes()
    store.codes["start"] = codes(-705)
    store.codes["get_size"] = codes(-703)
    if not dies:
        store.values["k"] = other
    assert objects.put([item()], LONG) == [Put.STORED if dies else Put.HELD]  # at the second try
    assert objects.counters().retries == 1
    store.always["start"] = -600  # another thread of this process
    assert objects.put([item("l")], LONG) == [Put.FAILED]
    assert outcomes(objects.counters(), "put")["unfinished"] == 1


GET_CODES = {
    -704: "absent",
    -703: "unfinished",
    -800: "transfer",
    -801: "checksum",
    -900: "unreachable",
    -901: "unreachable",
    -600: "short",
    -1: "refused",
    -10: "refused",
    99: "short",
}


@pytest.mark.parametrize("code", GET_CODES)
def test_a_get_that_fails_is_a_miss(store: FakeStore, opened: Open, code: int) -> None:
    objects = opened()
    objects.put([item("a"), item("b")], LONG)
    store.codes["get"] = codes(code)
    missed, value = objects.get([Read("a"), Read("b")], LONG)
    assert missed is None and value is not None and value.tobytes() == store.values["b"]
    assert outcomes(objects.counters(), "get") == {GET_CODES[code]: 1, "hit": 1}


@pytest.mark.parametrize("code", [-704, -703, -900])
def test_a_size_that_is_not_known_is_a_miss(store: FakeStore, opened: Open, code: int) -> None:
    objects = opened()
    objects.put([item("a")], LONG)
    store.codes["get_size"] = codes(code)
    assert objects.get([Read("a")], LONG) == [None]
    assert store.asked[-1] == ("get_size", "a")


def test_a_read_whose_lease_ended_is_read_again(store: FakeStore, opened: Open) -> None:
    objects = opened(tries=3)
    objects.put([item("a")], LONG)
    store.codes["get"] = codes(-707, -707)
    (value,) = objects.get([Read("a")], LONG)
    assert value is not None and objects.counters().retries == 2
    store.always["get"] = -707
    assert objects.get([Read("a")], LONG) == [None]
    assert outcomes(objects.counters(), "get") == {"hit": 1, "expired": 1}


def test_contains_asks_about_what_was_asked_only(store: FakeStore, opened: Open) -> None:
    objects = opened()
    objects.put([item("a"), item("b"), item("c")], LONG)
    store.asked.clear()
    assert objects.contains(["a", "x"], LONG) == [True, False]
    assert store.asked == [("batch_is_exist", "a"), ("batch_is_exist", "x")]
    store.codes["batch_is_exist"] = codes(-900, -1)
    assert objects.contains(["a", "b", "c"], LONG) == [False, False, True]
    assert outcomes(objects.counters(), "contains") == {"hit": 2, "absent": 1, "unreachable": 1, "refused": 1}


def test_remove_waits_for_a_lease_as_long_as_it_may(store: FakeStore, opened: Open) -> None:
    objects = opened()
    objects.put([item("a"), item("b")], LONG)
    store.codes["batch_remove"] = codes(-706, 0, -703)
    assert objects.remove(["a", "b"], LONG) == [True, True]
    assert objects.remove(["a"], LONG) == [True]  # it is gone
    store.always["batch_remove"] = -706
    start = monotonic()
    assert objects.remove(["b"], SOON) == [False] and monotonic() - start < 10 * SOON
    store.always["batch_remove"] = -900
    assert objects.remove(["b"], LONG) == [False]


def test_a_library_that_raises_is_a_miss(
    store: FakeStore, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    objects = opened()
    store.raises["put"] = store.raises["get"] = RuntimeError("out of order")
    assert objects.put([item()], LONG) == [Put.FAILED] and not store.sessions
    store.values["k"] = b"1"
    assert objects.get([Read("k")], LONG) == [None] and "out of order" in caplog.text
    assert outcomes(objects.counters(), "put") == {"broken": 1}


def test_wrong_use_is_refused(opened: Open) -> None:
    objects = opened()
    with pytest.raises(ValueError, match="at least one byte"):
        objects.put([item(nbytes=0)], LONG)
    with pytest.raises(ValueError, match="positive"):
        objects.get([Read("a")], 0)
    with pytest.raises(ValueError, match="a key or group is"):
        objects.contains(["no key"], LONG)
    assert objects.put([], LONG) == [] == objects.get([], LONG)


# Where the bytes lie.

SIZES = [100, STRAIGHT, 0, 7, 64, 3 * MIB + 5, STRAIGHT - 1, 2 * STRAIGHT]


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_pieces_of_all_sizes_arrive_in_order(store: FakeStore, opened: Open, protocol: str) -> None:
    store.rdma = protocol == "rdma"
    objects = opened(protocol=protocol)
    items = [
        Item(f"k{i}", [random_bytes(n, n) for n in np.roll(SIZES, i)], "one" if i else None) for i in range(3)
    ]
    assert objects.put(items, LONG) == [Put.STORED] * 3
    for put in items:
        assert store.values[put.key] == b"".join(piece.tobytes() for piece in put.pieces)
    assert store.groups == {"k0": "k0", "k1": "one", "k2": "one"}
    copied = sum(SIZES) if store.rdma else sum(n for n in SIZES if n < STRAIGHT)
    assert objects.counters().copied == 3 * copied


def test_a_version_without_groups_gets_none(store: FakeStore, opened: Open) -> None:
    assert opened(groups=False).put([Item("k", [random_bytes(5)], "g")], LONG) == [Put.STORED]
    assert store.groups == {"k": ""}


def test_runs_join_where_they_touch() -> None:
    whole, runs = random_bytes(1000), []
    for start, end in ((0, 10), (10, 10), (10, 30), (31, 40), (40, 50)):
        extend(runs, whole[start:end])
    assert runs == [(whole.ctypes.data, 30), (whole.ctypes.data + 31, 19)]


def test_a_library_call_has_no_more_than_a_batch(
    store: FakeStore, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "BATCH_NBYTES", 1000)
    objects, piece = opened(), random_bytes(499)
    items = [Item(f"k{i}", [piece]) for i in range(5)] + [Item("big", [piece] * 3)]
    assert objects.put(items, LONG) == [Put.STORED] * 6
    assert [count for method, count in store.batches if method == "put"] == [2, 2, 1, 1]
    store.batches.clear()
    found = objects.get([Read(put.key) for put in items], LONG)
    assert [value.nbytes for value in found if value is not None] == [put.nbytes for put in items]
    assert [count for method, count in store.batches if method == "get"] == [2, 2, 1, 1]


@pytest.mark.parametrize("nbytes", [1, 100, STRAIGHT - 1, STRAIGHT, MIB + 3])
def test_what_is_read_is_the_callers_alone(store: FakeStore, opened: Open, nbytes: int) -> None:
    objects = opened()
    objects.put([item("a", nbytes, 1), item("b", nbytes, 2)], LONG)
    (first,) = objects.get([Read("a")], LONG)
    assert first is not None
    kept = first[nbytes // 2 :]
    del first
    gc.collect()
    for _ in range(3):
        (other,) = objects.get([Read("b")], LONG)
        assert other is not None and other.tobytes() == store.values["b"]
    assert kept.tobytes() == store.values["a"][nbytes // 2 :]


def test_small_values_hold_no_memory_of_the_adapters(store: FakeStore, opened: Open) -> None:
    objects = opened()
    objects.put([item()], LONG)
    values = [objects.get([Read("k")], LONG) for _ in range(10)]
    assert len(store.registered) == 1 and len(values) == 10


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [(0, None), (0, 5), (3, 5), (95, 5), (96, 5), (100, None), (100, 0), (101, None), (101, 0), (0, 0)],
)
def test_a_part_is_whole_or_a_miss(opened: Open, start: int, nbytes: int | None) -> None:
    objects = opened()
    objects.put([item()], LONG)
    (value,) = objects.get([Read("k", start, nbytes)], LONG)
    whole = item().pieces[0]
    end = 100 if nbytes is None else start + nbytes
    if start <= end <= 100:
        assert value is not None and value.tobytes() == whole[start:end].tobytes()
        assert not value.nbytes or value.ctypes.data % 64 == 0
    else:
        assert value is None


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 2**30), (0, 2**70), (2**70, 1), (2**70, None), (0, 2**26 + 1)]
)
def test_a_claimed_length_takes_no_memory(
    store: FakeStore, opened: Open, start: int, nbytes: int | None
) -> None:
    objects = opened()
    objects.put([item()], LONG)
    before = dict(store.registered)
    assert objects.get([Read("k", start, nbytes)], LONG) == [None]
    assert outcomes(objects.counters(), "get") == {"short": 1}
    assert ("get", "k") not in store.asked and store.registered == before
