"""What every store of objects does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from transfer import Closed, Item, Objects, Put, Read
from transfer_site import MIB, STORES, TIMEOUT, content, item, read


@pytest.fixture(params=STORES)
def objects(request: pytest.FixtureRequest) -> Iterator[Objects]:
    """Each store in turn, empty."""
    with STORES[request.param](request) as store:
        yield store


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4096, 300_001, 5 * MIB])
def test_an_object_comes_back_as_it_was(objects: Objects, nbytes: int) -> None:
    data = content("a", nbytes)
    assert objects.put([item("a", data)], TIMEOUT) == [Put.STORED]
    assert read(objects, "a") == data
    assert objects.contains(["a", "b"], TIMEOUT) == [True, False]


def test_pieces_follow_each_other(objects: Objects) -> None:
    pieces = [np.frombuffer(content(f"{i}", i % 71), np.uint8) for i in range(3000)]
    assert objects.put([Item("a", pieces)], TIMEOUT) == [Put.STORED]
    assert read(objects, "a") == b"".join(piece.tobytes() for piece in pieces)


@pytest.mark.parametrize(
    "key", ["a", "A", "a/b", "a/", "/", "..", "../a", "a//b", "x" * 512, "-", "CON"], ids=lambda key: key[:9]
)
def test_any_key_is_one(objects: Objects, key: str) -> None:
    keys = [key, key[:-1] + "q", "zz"]
    assert objects.put([item(k, content(k, 100)) for k in keys], TIMEOUT) == [Put.STORED] * 3
    assert [read(objects, k) for k in keys] == [content(k, 100) for k in keys]


def test_keys_that_begin_alike_or_differ_in_case_are_others(objects: Objects) -> None:
    keys = ["n", "N", "n/1", "n/1/2", "n/12", "n.1"]
    assert objects.put([item(k, content(k, 50)) for k in keys], TIMEOUT) == [Put.STORED] * len(keys)
    assert objects.remove(["n/1"], TIMEOUT) == [True]
    assert [read(objects, k) for k in keys] == [content(k, 50) if k != "n/1" else None for k in keys]


@pytest.mark.parametrize(
    ("start", "nbytes", "found"),
    [
        (0, None, True),
        (0, 1000, True),
        (0, 0, True),
        (64, 100, True),
        (999, 1, True),
        (1000, 0, True),
        (1000, None, True),
        (990, None, True),
        (0, 1001, False),
        (999, 2, False),
        (1001, None, False),
        (1001, 0, False),
        (5000, 1, False),
        (0, 2**30, False),
        (2**62, 2**62, False),
        (0, 2**70, False),
    ],
)
def test_a_range_is_read_whole_or_not(objects: Objects, start: int, nbytes: int | None, found: bool) -> None:
    data = content("a", 1000)
    objects.put([item("a", data)], TIMEOUT)
    [raw] = objects.get([Read("a", start, nbytes)], TIMEOUT)
    if found:
        assert raw is not None and raw.dtype == np.uint8
        assert raw.tobytes() == (data[start:] if nbytes is None else data[start : start + nbytes])
    else:
        assert raw is None


def test_a_batch_ends_one_by_one(objects: Objects) -> None:
    a, b = content("a", 500), content("b", 700)
    assert objects.put([item("a", a)], TIMEOUT) == [Put.STORED]
    assert objects.put([item("b", b), item("a", a)], TIMEOUT) == [Put.STORED, Put.HELD]
    reads = [Read("none"), Read("b", 10, 20), Read("a"), Read("b"), Read("b", 600, 200), Read("a", 3)]
    got = [raw if raw is None else raw.tobytes() for raw in objects.get(reads, TIMEOUT)]
    assert got == [None, b[10:30], a, b, None, a[3:]]
    assert objects.contains(["b", "none", "a"], TIMEOUT) == [True, False, True]
    assert objects.remove(["none", "a"], TIMEOUT) == [True, True]
    assert objects.contains(["b", "none", "a"], TIMEOUT) == [True, False, False]


def test_empty_batches_do_nothing(objects: Objects) -> None:
    assert objects.put([], TIMEOUT) == objects.get([], TIMEOUT) == []
    assert objects.contains([], TIMEOUT) == objects.remove([], TIMEOUT) == []


def test_nothing_is_overwritten(objects: Objects) -> None:
    first = content("a", 300)
    assert objects.put([item("a", first)], TIMEOUT) == [Put.STORED]
    assert objects.put([item("a", content("other", 300))], TIMEOUT) == [Put.HELD]
    assert objects.put([item("a", content("other", 301))], TIMEOUT) == [Put.CONFLICT]
    assert read(objects, "a") == first


def test_what_was_removed_can_be_stored_anew(objects: Objects) -> None:
    for data in (content("a", 300), content("b", 200)):
        assert objects.put([item("a", data)], TIMEOUT) == [Put.STORED]
        assert read(objects, "a") == data
        assert objects.remove(["a"], TIMEOUT) == [True]
        assert objects.contains(["a"], TIMEOUT) == [False] and read(objects, "a") is None


def test_nobody_shares_memory(objects: Objects) -> None:
    source = np.frombuffer(content("a", 5000), np.uint8).copy()
    expected = source.tobytes()
    objects.put([Item("a", [source])], TIMEOUT)
    source[:] = 0
    one, two = objects.get([Read("a"), Read("a")], TIMEOUT)
    assert one is not None and two is not None
    assert one.tobytes() == two.tobytes() == expected
    one[:] = 7
    assert two.tobytes() == expected and read(objects, "a") == expected


def test_threads_see_whole_objects(objects: Objects) -> None:
    """Eight threads put, read and remove the same 12 keys of two lengths each."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(120):
            key = f"k{rng.integers(12)}"
            nbytes = 20_000 + int(rng.integers(2))
            [put] = objects.put([item(key, content(key, 20_001)[:nbytes])], TIMEOUT)
            if put not in (Put.STORED, Put.HELD, Put.CONFLICT):
                wrong.append(f"put {put}")
            raw = read(objects, key)
            if raw is not None and raw != content(key, 20_001)[: len(raw)]:
                wrong.append(f"{key} has other bytes")
            if raw is not None and len(raw) < 20_000:
                wrong.append(f"{key} is short")
            if rng.random() < 0.3 and objects.remove([key], TIMEOUT) != [True]:
                wrong.append(f"{key} was not removed")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("same", [True, False], ids=["equal", "different"])
def test_of_two_writers_one_stores(objects: Objects, same: bool) -> None:
    for turn in range(20):
        key, start, puts = f"k{turn}", threading.Barrier(2), []

        def write(writer: int, key: str = key, start: threading.Barrier = start, puts: list = puts) -> None:
            mine = item(key, content("one" if same or not writer else "two", 100_000))
            start.wait()
            puts.extend(objects.put([mine], TIMEOUT))

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {put.value for put in puts} == {"stored", "held"}
        assert read(objects, key) in (content("one", 100_000), content("two", 100_000))


@pytest.mark.parametrize("key", ["", "a b", "ä", "a\n", "a\0", "x" * 513, "a:b"], ids=repr)
def test_a_bad_key_is_refused(objects: Objects, key: str) -> None:
    for call in (
        lambda: objects.put([item(key, b"1")], TIMEOUT),
        lambda: objects.get([Read(key)], TIMEOUT),
        lambda: objects.contains([key], TIMEOUT),
        lambda: objects.remove([key], TIMEOUT),
    ):
        with pytest.raises(ValueError, match="key"):
            call()


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ([item("a", b"")], "a: .*at least one byte"),
        ([Item("a", [])], "a: .*at least one byte"),
        ([item("a", b"1"), item("a", b"2")], "distinct"),
        ([Item("a", [np.zeros(3, np.float32)])], r"uint8.*float32 \(3,\)"),  # type: ignore[list-item]
        ([Item("a", [np.zeros((3, 2), np.uint8)])], r"\(3, 2\)"),
        ([Item("a", [np.zeros(6, np.uint8)[::2]])], "contiguous"),
        ([item("a", b"1", "a b")], "group"),
    ],
    ids=["empty", "no pieces", "twice", "dtype", "matrix", "strided", "group"],
)
def test_what_is_no_object_is_refused(objects: Objects, items: list[Item], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        objects.put([item("b", b"1"), *items], TIMEOUT)
    assert not objects.contains(["b"], TIMEOUT)[0]


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_is_positive(objects: Objects, timeout: float) -> None:
    for call in (
        lambda: objects.put([item("a", b"1")], timeout),
        lambda: objects.get([Read("a")], timeout),
        lambda: objects.contains(["a"], timeout),
        lambda: objects.remove(["a"], timeout),
    ):
        with pytest.raises(ValueError, match="timeout"):
            call()


def test_what_comes_too_late_is_not_begun(objects: Objects) -> None:
    objects.put([item("a", b"1")], TIMEOUT)
    assert objects.put([item("b", b"1"), item("c", b"1")], 1e-9) == [Put.LATE, Put.LATE]
    assert objects.get([Read("a"), Read("b")], 1e-9) == [None, None]
    assert read(objects, "a") == b"1"


@pytest.mark.parametrize(("start", "nbytes"), [(-1, None), (0, -1)])
def test_a_negative_range_is_refused(objects: Objects, start: int, nbytes: int | None) -> None:
    with pytest.raises(ValueError, match="negative"):
        objects.get([Read("a", start, nbytes)], TIMEOUT)


def test_every_object_is_counted_once(objects: Objects) -> None:
    objects.put([item("a", b"12345"), item("b", b"1")], TIMEOUT)
    objects.put([item("a", b"12345")], TIMEOUT)
    objects.get([Read("a"), Read("a", 0, 3), Read("none")], TIMEOUT)
    objects.contains(["a", "none"], TIMEOUT)
    objects.remove(["a"], TIMEOUT)
    operations = objects.counters().operations
    counted = {
        key: (one.objects, one.nbytes)
        for key, one in operations.items()
        if key[1] in ("stored", "held", "hit") or key[0] == "remove"
    }
    assert counted == {
        ("put", "stored"): (2, 6),
        ("put", "held"): (1, 0),
        ("get", "hit"): (2, 8),
        ("contains", "hit"): (1, 0),
        ("remove", "removed"): (1, 0),
    }
    assert sum(one.objects for (operation, _), one in operations.items() if operation == "get") == 3


def test_a_closed_store_says_so(objects: Objects) -> None:
    objects.put([item("a", b"1")], TIMEOUT)
    objects.close()
    objects.close()
    for call in (
        lambda: objects.put([item("a", b"1")], TIMEOUT),
        lambda: objects.get([Read("a")], TIMEOUT),
        lambda: objects.contains(["a"], TIMEOUT),
        lambda: objects.remove(["a"], TIMEOUT),
    ):
        with pytest.raises(Closed, match="closed"):
            call()
    assert objects.counters().operations["put", "stored"].objects == 1


def test_close_lets_a_call_end(objects: Objects) -> None:
    """Calls that run while the store is closed end with what they would have, or with Closed."""
    objects.put([item(f"k{i}", content(f"k{i}", MIB)) for i in range(8)], TIMEOUT)
    ended: list[object] = []
    started = threading.Barrier(3)

    def work() -> None:
        started.wait()
        while True:
            try:
                got = objects.get([Read(f"k{i}") for i in range(8)], TIMEOUT)
            except Closed:
                ended.append("closed")
                return
            whole = [raw is not None and raw.tobytes() == content(f"k{i}", MIB) for i, raw in enumerate(got)]
            ended.append(all(whole))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    objects.close()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert set(ended) <= {True, "closed"} and ended.count("closed") == 2
