"""Whole checkpoints in stores: all of one or nothing, whatever happened to its objects."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transfer import (
    About,
    MemoryObjects,
    Miss,
    Objects,
    Put,
    Read,
    Recorder,
    checkpoint,
    fetch,
    publish,
    withdraw,
)
from transfer.manifest import BODY, HEADER, MAGIC, Leaf, Segment, decode, parts_of, signed
from transfer.packing import Digested, Shelf, digest
from transfer_site import (
    MIB,
    STORES,
    TIMEOUT,
    Watched,
    assert_same,
    edited,
    item,
    random_array,
    read,
    replace,
    wait,
)

PART = 512
ABOUT = About("model a", 128, None)
GIB = 2**30


@pytest.fixture(params=STORES)
def objects(request: pytest.FixtureRequest) -> Iterator[Objects]:
    """Each store in turn, empty."""
    with STORES[request.param](request) as store:
        yield store


def arrays(seed: int = 0) -> dict[str, NDArray]:
    """Three parts: of two leaves, of a leaf and a half, of the other half; the leaf `shared` has no seed."""
    return {
        "a": random_array(seed, "bfloat16", (10, 20)),
        "b": random_array(seed, "int8", (50,)),
        "long": random_array(seed, "float32", (200,)),
        "none": random_array(seed, "int8", (0, 3)),
        "shared": random_array(100, "int32", (100,)),
    }


def put_in(objects: Objects, seed: int = 0, name: str = "n") -> Put:
    return publish(objects, name, arrays(seed), ABOUT, TIMEOUT, PART)


def keys_of(objects: Objects, name: str = "n") -> list[str]:
    """All objects of a checkpoint, the manifest last."""
    raw = read(objects, name)
    assert raw is not None
    return [*decode(np.frombuffer(raw, np.uint8)).part_keys(name), name]


def outcome(
    objects: Objects, leaves: list[str] | None = None, namespace: str = "model a", timeout: float = TIMEOUT
) -> str:
    """How fetching ended; the bytes of a hit are compared."""
    recorder = Recorder()
    got = fetch(objects, "n", namespace, leaves, timeout, recorder)
    [(operation, how)] = recorder.snapshot().operations
    assert operation == "fetch" and (how == "hit") == (got is not None)
    if got is not None:
        assert_same(
            got.arrays, {name: array for name, array in arrays().items() if name in (leaves or arrays())}
        )
    return how


def test_parts_are_stored_before_the_manifest_and_removed_after_it() -> None:
    objects = Watched(MemoryObjects())
    assert put_in(objects) is Put.STORED
    puts = [[one.key for one in what] for operation, what in objects.calls if operation == "put"]
    *parts, manifest = keys_of(objects)
    assert puts == [[part] for part in parts] + [[manifest]] and len(parts) == 4
    assert {one.group for operation, what in objects.calls if operation == "put" for one in what} == {"n"}
    objects.calls.clear()
    assert withdraw(objects, "n", TIMEOUT)
    assert objects.calls == [("get", [Read("n")]), ("remove", ["n"]), ("remove", parts)]
    assert objects.contains([*parts, "n"], TIMEOUT) == [False] * 5


def test_one_part_is_digested_while_another_is_stored_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = [], []
    changed = threading.Condition()

    def noted(shelf: Shelf) -> Digested:
        begun.append(shelf.index)
        part = digest(shelf)
        with changed:
            ended.append(shelf.index)
            changed.notify_all()
        return part

    def store(operation: str, what: list[Any]) -> None:
        if operation == "put":
            coming = min(len(objects.calls) + 1, 4)  # of four parts
            with changed:
                assert changed.wait_for(lambda: len(ended) == coming, TIMEOUT)
            time.sleep(0.02)
            assert begun == ended == list(range(coming))

    monkeypatch.setattr(checkpoint, "digest", noted)
    objects = Watched(MemoryObjects())
    objects.before = store
    assert put_in(objects) is Put.STORED and outcome(objects.inner) == "hit"


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("put", [Put.FULL, Put.FAILED, Put.LATE], ids=lambda put: put.value)
def test_nothing_is_put_after_a_part_that_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, which: int, put: Put
) -> None:
    """Neither more parts nor a manifest, and nothing is still being digested when the call has ended."""
    begun, ended = [], []

    def slow(shelf: Shelf) -> Digested:
        begun.append(shelf.index)
        time.sleep(0.01)
        ended.append(shelf.index)
        return digest(shelf)

    model = MemoryObjects()
    put_in(model)
    keys, objects = keys_of(model), Watched(MemoryObjects())
    objects.fails[f"put {keys[which]}"] = put
    monkeypatch.setattr(checkpoint, "digest", slow)
    assert put_in(objects) is put
    assert begun == ended == list(range(min(which + 2, 4)))
    tried = [one.key for operation, what in objects.calls if operation == "put" for one in what]
    assert tried == keys[: which + 1]


def test_a_digest_that_fails_ends_it_without_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shelf: Shelf) -> Digested:
        if shelf.index == 2:
            raise MemoryError
        return digest(shelf)

    monkeypatch.setattr(checkpoint, "digest", fails)
    objects = MemoryObjects()
    with pytest.raises(MemoryError):
        put_in(objects)
    assert outcome(objects) == "absent"
    monkeypatch.undo()
    assert put_in(objects) is Put.STORED and outcome(objects) == "hit"


def test_a_leaf_that_is_refused_is_so_before_anything_is_stored() -> None:
    objects = Watched(MemoryObjects())
    with pytest.raises(ValueError, match="zz"):
        publish(objects, "n", arrays() | {"zz": np.zeros(3, ">f4")}, ABOUT, TIMEOUT, PART)
    assert not objects.calls


def test_withdrawing_what_is_not_there_is_done(objects: Objects) -> None:
    assert withdraw(objects, "n", TIMEOUT)


def test_a_checkpoint_is_held_once(objects: Objects) -> None:
    assert put_in(objects) is Put.STORED
    assert put_in(objects) is Put.HELD
    assert outcome(objects) == "hit"


@pytest.mark.parametrize("change", ["bytes", "shape", "boundary", "parent", "parts"])
def test_of_two_checkpoints_the_first_stays(objects: Objects, change: str) -> None:
    """The other one leaves nothing behind, and takes away nothing of the first: they share a part."""
    assert put_in(objects) is Put.STORED
    keys, other = keys_of(objects), arrays()
    if change == "bytes":
        other = arrays(1)
    if change == "shape":
        other["a"] = other["a"].reshape(20, 10)
    about = {"boundary": ABOUT._replace(boundary=129), "parent": ABOUT._replace(parent="m")}.get(
        change, ABOUT
    )
    watched = Watched(objects)
    part_nbytes = 576 if change == "parts" else PART
    assert publish(watched, "n", other, about, TIMEOUT, part_nbytes) is Put.CONFLICT
    tried = {one.key for operation, what in watched.calls if operation == "put" for one in what}
    assert objects.contains(sorted(tried - set(keys)), TIMEOUT) == [False] * len(tried - set(keys))
    assert (tried - set(keys) != set()) == (change in ("bytes", "parts"))
    assert keys_of(objects) == keys and outcome(objects) == "hit"


def test_no_room_leaves_nothing_behind() -> None:
    objects = Watched(MemoryObjects(1500))
    assert put_in(objects) is Put.FULL
    tried = sorted({one.key for operation, what in objects.calls if operation == "put" for one in what})
    assert "n" not in tried and objects.contains(tried, TIMEOUT) == [False] * len(tried)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("put", [Put.FULL, Put.FAILED], ids=["full", "failed"])
def test_an_object_that_is_not_stored_leaves_nothing_behind(which: int, put: Put) -> None:
    model = MemoryObjects()
    put_in(model)
    keys = keys_of(model)
    objects = Watched(MemoryObjects())
    objects.fails[f"put {keys[which]}"] = put
    assert put_in(objects) is put
    assert objects.contains(keys, TIMEOUT) == [False] * 5


@pytest.mark.parametrize("readable", [True, False], ids=["", "its manifest cannot be read"])
def test_the_first_of_two_keeps_a_part_that_the_other_one_stored(readable: bool) -> None:
    """The other one has stored its parts, one of which is equal, when the first one begins and ends."""
    objects = Watched(MemoryObjects())
    reads = 0

    def overtake(operation: str, what: list[Any]) -> None:
        nonlocal reads
        if operation == "put" and what[0].key == "n":
            assert put_in(objects.inner) is Put.STORED
        reads += operation == "get"
        if reads == 2 and not readable:  # of what is to be taken back
            objects.fails = {"get n": None}

    objects.before = overtake
    assert put_in(objects, seed=1) is Put.CONFLICT
    objects.fails = {}
    assert outcome(objects.inner) == "hit"
    assert reads == 2


def test_a_damaged_part_that_stays_is_no_other_checkpoint() -> None:
    objects = Watched(MemoryObjects())
    put_in(objects)
    for key in keys_of(objects)[:-1]:
        objects.fails = {f"put {key}": Put.CONFLICT, f"remove {key}": False}
        assert put_in(objects) is Put.FAILED
        objects.fails = {f"put {key}": Put.CONFLICT}
        assert put_in(objects) is Put.FAILED
        objects.fails = {}
        assert put_in(objects).there and outcome(objects) == "hit"


def test_a_manifest_that_may_come_late_keeps_its_parts() -> None:
    objects = Watched(MemoryObjects())
    objects.fails = {"put n": Put.LATE}
    assert put_in(objects) is Put.LATE
    parts = [one.key for operation, what in objects.calls if operation == "put" for one in what][:-1]
    assert len(parts) == 4 and all(objects.contains(parts, TIMEOUT))


def test_a_failing_put_takes_nothing_from_an_equal_checkpoint() -> None:
    objects = Watched(MemoryObjects())
    put_in(objects)
    for key in keys_of(objects):
        objects.fails = {f"put {key}": Put.FAILED, "get n": None}
        assert put_in(objects) is Put.FAILED
        objects.fails = {}
        assert outcome(objects) == "hit"


def test_another_writer_goes_on_where_one_was_killed(objects: Objects) -> None:
    """The first one wrote all parts, or some, and no manifest."""
    model = MemoryObjects()
    put_in(model, seed=1)
    left = keys_of(model)[:-1]
    for count in (2, 4):
        for key in left[:count]:
            data = read(model, key)
            assert data is not None
            objects.put([item(key, data, "n")], TIMEOUT)
        assert outcome(objects) == "absent"
        assert put_in(objects) is Put.STORED
        assert outcome(objects) == "hit"
        assert withdraw(objects, "n", TIMEOUT)


def gone(data: bytes) -> bytes:
    return b""


def cut(data: bytes) -> bytes:
    return data[:-1]


def grown(data: bytes) -> bytes:
    return data + b"\0"


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def flipped_late(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 128])


DAMAGES = [gone, cut, grown, flipped, flipped_late]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_any_object_damaged_is_a_miss_until_it_is_stored_again(
    objects: Objects, which: int, damage: Callable[[bytes], bytes]
) -> None:
    put_in(objects)
    keys = keys_of(objects)
    data = read(objects, keys[which])
    assert data is not None
    replace(objects, keys[which], damage(data), "n")
    how = outcome(objects)
    if which == 4:
        assert how == ("absent" if damage is gone else "damaged manifest")
    elif damage is grown:
        assert how == "hit"  # what the manifest names is there
    else:
        assert how == ("lost part" if damage in (gone, cut) else "damaged part")
    assert put_in(objects) in (Put.STORED, Put.HELD)
    assert outcome(objects) == "hit"


@pytest.mark.parametrize("damage", [gone, cut, flipped], ids=lambda damage: damage.__name__)
def test_a_leaf_does_not_need_the_parts_of_others(objects: Objects, damage: Callable[[bytes], bytes]) -> None:
    put_in(objects)
    _, *others = keys_of(objects)[:-1]
    for key in others:
        data = read(objects, key)
        assert data is not None
        replace(objects, key, damage(data), "n")
    assert outcome(objects, ["a", "b"]) == "hit"
    assert outcome(objects, ["none"]) == "hit"
    assert outcome(objects, ["a", "shared"]) in ("lost part", "damaged part")


MANIFESTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another version": (lambda raw: signed(raw[BODY:], version=2), "version"),
    "not JSON": (lambda raw: signed(b"\x80 not json"), "damaged manifest"),
    "empty": (lambda raw: signed(b"{}"), "damaged manifest"),
    "a body of 1 GiB": (lambda raw: HEADER.pack(MAGIC, 1, GIB) + bytes(16), "damaged manifest"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_cannot_be_used_is_a_miss(objects: Objects, kind: str) -> None:
    change, expected = MANIFESTS[kind]
    put_in(objects)
    raw = read(objects, "n")
    assert raw is not None
    replace(objects, "n", change(raw), "n")
    assert outcome(objects) == expected
    if expected == "version":  # another program's
        assert put_in(objects) is Put.CONFLICT
        assert read(objects, "n") == change(raw)


def test_another_namespace_is_a_miss_and_stays(objects: Objects) -> None:
    put_in(objects)
    assert outcome(objects, namespace="model b") == "namespace"
    assert outcome(objects, namespace="") == "namespace"
    assert outcome(objects) == "hit"


def test_a_leaf_that_is_not_there_is_a_miss(objects: Objects) -> None:
    put_in(objects)
    assert outcome(objects, ["a", "other"]) == "leaf"


def test_one_gib_that_is_not_there_takes_no_memory(objects: Objects) -> None:
    """A manifest whose digests are right claims a leaf of 1 GiB, of which the store has 100 bytes."""
    claim = {"name": "a", "dtype": "int8", "shape": [GIB]}
    segment = {"part": 0, "offset": 0, "nbytes": GIB, "digest": "0" * 32}
    put_in(objects)
    raw = read(objects, "n")
    assert raw is not None
    small = decode(np.frombuffer(raw, np.uint8))
    [part] = parts_of([Leaf("a", "int8", (GIB,), (Segment(**segment),))])

    def lie(content: Any) -> None:
        content.update(leaves=[claim | {"segments": [segment]}], parts=[part._asdict()])

    huge = edited(raw, lie)
    assert decode(np.frombuffer(huge, np.uint8)).parts == (part,) != small.parts
    replace(objects, "n", huge, "n")
    assert objects.put([item(f"n/{part.digest}", bytes(100), "n")], TIMEOUT) == [Put.STORED]
    tracemalloc.start()
    try:
        assert fetch(objects, "n", "model a", None, TIMEOUT) is None
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_no_call_outlasts_its_deadline_by_more_than_one_call() -> None:
    objects = Watched(MemoryObjects())
    put_in(objects)
    objects.before = wait(0.05)
    start = time.monotonic()
    assert outcome(objects, timeout=0.04) == "late"
    assert publish(objects, "m", arrays(), ABOUT, 0.04, PART) is Put.LATE
    assert not withdraw(objects, "n", 0.04)
    assert time.monotonic() - start < 5
    assert [operation for operation, _ in objects.calls[-3:]] == ["get", "put", "get"]
    objects.before = wait(0)
    assert outcome(objects) == "hit" and fetch(objects, "m", "model a", None, TIMEOUT) is None


def test_a_part_that_is_late_makes_the_checkpoint_late() -> None:
    objects = Watched(MemoryObjects())
    put_in(objects)
    [first, *_] = keys_of(objects)
    objects.fails = {f"put {first}": Put.LATE}
    assert put_in(objects) is Put.LATE


@pytest.mark.parametrize("same", [True, False], ids=["equal", "different"])
def test_of_two_writers_one_checkpoint_stays(objects: Objects, same: bool) -> None:
    for turn in range(15):
        name, start, puts = f"n{turn}", threading.Barrier(2), {}

        def write(writer: int, name: str = name, start: threading.Barrier = start, puts: dict = puts) -> None:
            start.wait()
            puts[writer] = put_in(objects, 0 if same else writer, name)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(put.value for put in puts.values()) == [*(["held"] if same else ["conflict"]), "stored"]
        winner = next(writer for writer, put in puts.items() if put is Put.STORED)
        got = fetch(objects, name, "model a", None, TIMEOUT)
        assert got is not None
        assert_same(got.arrays, arrays(0 if same else winner))


def test_readers_of_what_is_written_and_withdrawn_get_all_or_nothing(objects: Objects) -> None:
    """Two writers of different bytes and two readers for one name, without a pause."""
    stop, wrong, hits = threading.Event(), [], []

    def write(seed: int) -> None:
        while not stop.is_set():
            if not put_in(objects, seed).there:
                withdraw(objects, "n", TIMEOUT)

    def look() -> None:
        while not stop.is_set():
            got = fetch(objects, "n", "model a", None, TIMEOUT)
            if got is not None:
                hits.append(got)
                seed = 0 if got.arrays["b"].tobytes() == arrays(0)["b"].tobytes() else 1
                try:
                    assert_same(got.arrays, arrays(seed))
                except AssertionError as error:
                    wrong.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    threads += [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and hits


def test_an_empty_checkpoint_is_one(objects: Objects) -> None:
    assert publish(objects, "n", {}, ABOUT, TIMEOUT) is Put.STORED
    got = fetch(objects, "n", "model a", None, TIMEOUT)
    assert got is not None and got.arrays == {} and got.about == ABOUT


@pytest.mark.parametrize("name", ["", "a b", "x" * 480], ids=["empty", "space", "480 characters"])
def test_a_bad_name_is_refused(objects: Objects, name: str) -> None:
    with pytest.raises(ValueError, match="key"):
        publish(objects, name, arrays(), ABOUT, TIMEOUT)
    if len(name) < 480:
        with pytest.raises(ValueError, match="key"):
            fetch(objects, name, "model a", None, TIMEOUT)
        with pytest.raises(ValueError, match="key"):
            withdraw(objects, name, TIMEOUT)


def test_a_name_of_479_characters_is_none_too_many(objects: Objects) -> None:
    assert publish(objects, "x" * 479, arrays(), ABOUT, TIMEOUT) is Put.STORED


def test_outcomes_and_copies_are_counted() -> None:
    objects, recorder = MemoryObjects(), Recorder()
    twisted = {"a": random_array(0, "int32", (4, 6)).T}
    for expected in (Put.STORED, Put.HELD):
        assert publish(objects, "n", twisted, ABOUT, TIMEOUT, recorder=recorder) is expected
    fetch(objects, "n", "model a", None, TIMEOUT, recorder)
    fetch(objects, "m", "model a", None, TIMEOUT, recorder)
    counters = recorder.snapshot()
    counted = {key: one.objects for key, one in counters.operations.items()}
    assert counted == {
        ("publish", "stored"): 1,
        ("publish", "held"): 1,
        ("fetch", "hit"): 1,
        ("fetch", Miss.ABSENT.value): 1,
    }
    assert counters.copied == 2 * 96 and counters.operations["fetch", "hit"].nbytes == 96


def test_only_a_leaf_that_was_cut_is_copied(objects: Objects) -> None:
    put_in(objects)
    got = fetch(objects, "n", "model a", None, TIMEOUT)
    assert got is not None and got.copied == 800 and got.nbytes == sum(a.nbytes for a in arrays().values())
