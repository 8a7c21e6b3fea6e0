"""MooncakeObjects over a real master and a store process: what is put is read, bit by bit; opened once, closed once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256

import pytest

from mooncake_fake import item, outcomes, random_bytes
from transfer import About, Item, Put, Read, Unavailable, fetch, publish
from transfer.dtypes import DTYPES
from transfer.mooncake import MooncakeObjects, MooncakeSettings
from transfer.mooncake.library import load, remedy
from transfer.mooncake.local import LocalMooncake
from transfer.mooncake.puts import STRAIGHT
from transfer_site import assert_same, random_array

LONG = 20.0
MIB = 2**20


@pytest.fixture(scope="module")
def local() -> Iterator[LocalMooncake]:
    try:
        load(MooncakeSettings())
    except Unavailable as error:
        pytest.skip(str(error))
    with LocalMooncake(segment_bytes=64 * MIB, lease_ms=1000, client_ttl_s=3) as local:
        yield local


@pytest.fixture(scope="module")
def opened(local: LocalMooncake) -> Iterator[MooncakeObjects]:
    with MooncakeObjects(MooncakeSettings(master=local.address)) as opened:
        yield opened


@pytest.fixture
def objects(opened: MooncakeObjects) -> Iterator[MooncakeObjects]:
    yield opened
    opened._library.store.remove_all(True)  # type: ignore[attr-defined]


def python(program: str, *arguments: str, **environment: str) -> str:
    """What a program prints in a process of its own, which ends well."""
    path = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


SIZES = {
    "byte": [1],
    "small": [7] * 100,
    "straight": [STRAIGHT],
    "large": [20 * MIB + 3],
    "strides": [STRAIGHT - 1] * 18,
    "mixed": [64, STRAIGHT, 0, 100, 3 * MIB + 1, STRAIGHT - 1, 2 * MIB, 5],
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_put_is_read_in_this_and_another_process(
    objects: MooncakeObjects, local: LocalMooncake, name: str
) -> None:
    put = Item("a/b-c_d.0", [random_bytes(n, i) for i, n in enumerate(SIZES[name])], "group")
    whole = b"".join(piece.tobytes() for piece in put.pieces)
    assert objects.put([put], LONG) == [Put.STORED]
    reads = [Read(put.key), Read(put.key, 0, len(whole)), Read(put.key, len(whole) // 2), Read(put.key, 1)]
    for read, value in zip(reads, objects.get(reads, LONG)):
        assert value is not None and value.tobytes() == whole[read.start :]
    assert objects.get([Read(put.key, 1, len(whole)), Read(put.key, len(whole) + 1)], LONG) == [None, None]
    if name == "mixed":
        program = """
import sys
from hashlib import sha256
from transfer import Read
from transfer.mooncake import MooncakeObjects, MooncakeSettings
with MooncakeObjects(MooncakeSettings(master=sys.argv[1])) as objects:
    print(sha256(objects.get([Read(sys.argv[2])], 20)[0]).hexdigest())
"""
        assert python(program, local.address, put.key) == sha256(whole).hexdigest()


def test_a_checkpoint_of_every_dtype_goes_to_another_process_and_back(
    objects: MooncakeObjects, local: LocalMooncake
) -> None:
    arrays = {dtype: random_array(i, dtype, (3, 5, 7 * i)) for i, dtype in enumerate(DTYPES)}
    arrays["large"] = random_array(99, "bfloat16", (3 * MIB,))
    program = """
import sys
from transfer import About, fetch, publish
from transfer.mooncake import MooncakeObjects, MooncakeSettings
with MooncakeObjects(MooncakeSettings(master=sys.argv[1])) as objects:
    there = fetch(objects, "there", "model", None, 20.0)
    print(publish(objects, "back", there.arrays, About("model", 8, "there"), 20.0, 1 << 20).name)
"""
    assert publish(objects, "there", arrays, About("model", 7), LONG) is Put.STORED
    assert python(program, local.address) == "STORED"
    back = fetch(objects, "back", "model", None, LONG)
    assert back is not None
    assert_same(back.arrays, arrays)


def test_many_objects_in_one_call(objects: MooncakeObjects) -> None:
    items = [item(f"many/{i}", 1 + 400 * i, i) for i in range(100)]
    assert objects.put(items, LONG) == [Put.STORED] * 100
    found = objects.get([Read(put.key) for put in items] + [Read("none")], LONG)
    assert found.pop() is None
    for put, value in zip(items, found):
        assert value is not None and value.tobytes() == put.pieces[0].tobytes()
    assert objects.contains(["many/0", "none", "many/99"], LONG) == [True, False, True]


def test_an_older_object_stays(objects: MooncakeObjects) -> None:
    assert objects.put([item()], LONG) == [Put.STORED]
    assert objects.put([item(seed=1), item("l")], LONG) == [Put.HELD, Put.STORED]
    assert objects.put([item(nbytes=99)], LONG) == [Put.CONFLICT]
    (value,) = objects.get([Read("k")], LONG)
    assert value is not None and value.tobytes() == item().pieces[0].tobytes()


def test_a_second_checkpoint_of_a_name_is_taken_back_without_waiting_for_a_lease(
    objects: MooncakeObjects,
) -> None:
    first, about = {"a": random_array(0, "float32", (500,))}, About("model", 7)
    assert publish(objects, "n", first, about, LONG) is Put.STORED
    before = objects.counters()
    other = {"a": random_array(1, "float32", (500,))}
    assert publish(objects, "n", other, about, LONG) is Put.CONFLICT
    after = objects.counters()
    assert outcomes(after, "remove")["removed"] == outcomes(before, "remove").get("removed", 0) + 1
    assert after.retries == before.retries
    found = fetch(objects, "n", "model", None, LONG)
    assert found is not None
    assert_same(found.arrays, first)


def test_remove_waits_until_the_lease_is_over(objects: MooncakeObjects) -> None:
    objects.put([item("a"), item("b")], LONG)
    before = outcomes(objects.counters(), "remove").get("leased", 0)
    assert objects.remove(["a"], 0.3) == [False]
    assert outcomes(objects.counters(), "remove")["leased"] == before + 1
    assert objects.remove(["a", "none"], LONG) == [True, True]
    assert objects.contains(["a", "b"], LONG) == [False, True] and objects.get([Read("a")], LONG) == [None]


@pytest.mark.parametrize("nbytes", [100, MIB])
def test_a_value_that_is_held_never_changes(objects: MooncakeObjects, nbytes: int) -> None:
    items = [item(f"held/{i}", nbytes, i) for i in range(4)]
    objects.put(items, LONG)
    (held,) = objects.get([Read("held/0")], LONG)
    for _ in range(2):
        others = objects.get([Read(put.key) for put in items], LONG)
        assert all(
            other is not None and other.tobytes() == put.pieces[0].tobytes()
            for other, put in zip(others, items)
        )
    assert held is not None and held.tobytes() == items[0].pieces[0].tobytes()


def test_a_full_store_makes_room_or_says_so(objects: MooncakeObjects) -> None:
    """Of each group all objects are there afterwards, or none."""
    pieces = {n: [random_bytes(MIB, n)] for n in range(120)}
    groups = [[Item(f"full/{g}/{i}", pieces[4 * g + i], f"full/{g}") for i in range(4)] for g in range(30)]
    stored = [group for group in groups if objects.put(group, LONG) == [Put.STORED] * 4]
    assert len(stored) > 20  # 15 have room at a time
    there = [objects.contains([put.key for put in group], LONG) for group in stored]
    assert all(len(set(group)) == 1 for group in there) and there.count([False] * 4) > 5
    for group, found in zip(stored, there):
        if found[0]:
            (value,) = objects.get([Read(group[0].key)], LONG)
            assert value is None or value.tobytes() == group[0].pieces[0].tobytes()
    assert objects.put([item("large", 65 * MIB)], 0.3) == [Put.FULL]  # than the only segment


def test_memory_of_the_worker_itself_holds_objects(local: LocalMooncake) -> None:
    program = """
import sys
import numpy as np
from transfer import Item, Read
from transfer.mooncake import MooncakeObjects, MooncakeSettings
with MooncakeObjects(MooncakeSettings(master=sys.argv[1], segment_bytes=16 << 20)) as objects:
    piece = np.arange(5 << 20, dtype=np.uint32).view(np.uint8)[: 5 << 20]
    put = objects.put([Item("k", [piece])], 20)
    value = objects.get([Read("k")], 20)[0]
    print(put[0].name, np.array_equal(value, piece), np.shares_memory(value, piece))
"""
    with LocalMooncake(segment_bytes=0, client_ttl_s=3) as alone:
        assert python(program, alone.address) == "STORED True False"


# Opening and closing.


def test_a_process_has_one_store_at_a_time(local: LocalMooncake) -> None:
    program = """
import sys
from transfer import Closed, Unavailable
from transfer.mooncake import MooncakeObjects, MooncakeSettings
settings = MooncakeSettings(master=sys.argv[1])
first = MooncakeObjects(settings)
try:
    MooncakeObjects(settings)
except Unavailable as error:
    print("a Mooncake store already" in str(error), end=" ")
first.close()
first.close()
for call in (first.contains, first.remove, first.get, first.put):
    try:
        call([], 1.0)
    except Closed:
        print("closed", end=" ")
with MooncakeObjects(settings) as second:
    print(second.contains(["k"], 20.0))
"""
    assert python(program, local.address) == "True closed closed closed closed [False]"


def test_no_master_is_said_at_once(local: LocalMooncake) -> None:
    program = """
from time import monotonic
from transfer import Unavailable
from transfer.mooncake import MooncakeObjects, MooncakeSettings
start = monotonic()
try:
    MooncakeObjects(MooncakeSettings(master="127.0.0.1:9"))
except Unavailable as error:
    print(monotonic() - start < 5, error)
"""
    said = python(program)
    assert said.startswith("True no Mooncake master answers at 127.0.0.1:9 (")
    assert "--rpc_port=9`" in said and "MooncakeSettings.master" in said


def test_the_library_sees_the_environment_that_it_needs(local: LocalMooncake) -> None:
    program = """
import os, sys
from transfer.mooncake import MooncakeSettings
from transfer.mooncake.library import load
assert not any(name.startswith("mooncake") for name in sys.modules)
load(MooncakeSettings(hostname="127.0.0.2"))
print(*(os.environ[name] for name in ("MC_TCP_BIND_ADDRESS", "MC_STORE_CLIENT_SETUP_RETRIES", "MC_RPC_TIMEOUT_MS")))
"""
    assert python(program, MC_RPC_TIMEOUT_MS="77", MC_TCP_BIND_ADDRESS="127.0.0.3") == "127.0.0.3 1 77"


@pytest.mark.parametrize(
    ("said", "installed", "remedies"),
    [
        ("No module named 'mooncake'", False, "pip install 'mooncake-transfer-engine-non-cuda>="),
        ("libibverbs.so.1: cannot open shared object file", True, "apt-get install libibverbs1"),
        ("libcuda.so.1: cannot open shared object file", True, "pip uninstall mooncake-transfer-engine,"),
        (
            "libcudart.so.12: cannot open shared object file",
            True,
            "then pip install 'mooncake-transfer-engine-non-cuda>=",
        ),
        ("undefined symbol: x", True, "post1' --force-reinstall"),
    ],
)
def test_a_library_that_does_not_load_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, said: str, installed: bool, remedies: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert remedies in remedy(ImportError(said))


def test_a_missing_library_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(Unavailable, match="pip install"):
        load(MooncakeSettings())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"master": master} for master in ("", "host", ":1", "host:", "host:x", "host:0", "host:65536")),
        {"protocol": "udp"},
        {"devices": ("mlx5_0",)},
        *({name: -1} for name in ("segment_bytes", "recycled_bytes")),
        *({name: 0} for name in ("threads", "tries", "failures", "pause_s", "close_s")),
    ],
    ids=str,
)
def test_settings_are_checked(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MooncakeSettings(**wrong)


def test_settings_know_the_address() -> None:
    assert MooncakeSettings(master="[::1]:50051").address == ("::1", 50051)
    assert MooncakeSettings(protocol="rdma", devices=("mlx5_0",)).address == ("127.0.0.1", 50051)
