"""What may go wrong around a checkpoint in Mooncake, done to real processes: a miss, or a retry that succeeds.

Never wrong bytes, a call beyond its deadline, a crash, or the loss of what was there before. Each fault that must be
waited out has a Mooncake of its own, and all of these wait at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from time import monotonic, sleep
from typing import Any

import pytest
import xxhash

from own_network import own_network
from transfer import About
from transfer.manifest import BODY, HEADER, MAGIC, VERSION, Leaf, Manifest, Segment, encode, parts_of, signed
from transfer.mooncake.local import LocalMooncake
from transfer.packing import pack
from transfer_actor import NAMESPACE, Actor, Died, contents, digest, every_dtype, raw_bytes

MIB = 1 << 20
NBYTES = 1 << 16
PART = 1 << 14
TIMEOUT_S = 3.0
SHORT_S = 1.5
AGAIN_S = 25.0
AT_ONCE = 6
THERE = ("stored", "held")


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    with own_network():
        yield


@contextmanager
def local(
    segment_mib: int = 128, lease_ms: int = 300, ttl_s: int = 2, **settings: Any
) -> Iterator[LocalMooncake]:
    """A Mooncake that soon notices what is gone."""
    with LocalMooncake(
        segment_bytes=segment_mib * MIB, lease_ms=lease_ms, client_ttl_s=ttl_s, abandoned_put_s=2, **settings
    ) as mooncake:
        yield mooncake


def worker(mooncake: LocalMooncake, **settings: Any) -> Actor:
    """A process with a store on it, which tries a broken one again soon; one that lends no memory if not told."""
    return Actor("mooncake", master=mooncake.address, pause_s=0.3, **settings)


@cache
def expected(seed: int, nbytes: int) -> str:
    return digest(contents(seed, nbytes))


@cache
def raw_digest(seed: int, nbytes: int) -> str:
    return hashlib.sha256(raw_bytes(seed, nbytes).tobytes()).hexdigest()


def read(
    actor: Actor, name: str, *seeds: int, nbytes: int = NBYTES, timeout: float = TIMEOUT_S
) -> int | None:
    """Fetches; which of `seeds` the contents were made from, or None for a miss. Anything else is wrong bytes."""
    found, _ = actor.do("fetch", name=name, timeout=timeout)
    return None if found is None else {expected(seed, nbytes): seed for seed in seeds}[found]


def write(actor: Actor, name: str, seed: int, timeout: float = TIMEOUT_S, **more: Any) -> str:
    return actor.do("publish", name=name, seed=seed, timeout=timeout, **{"part_nbytes": PART} | more)


def until(happened: Callable[[], bool], within: float = AGAIN_S) -> bool:
    """Tries again, as a cache does with every checkpoint that it makes."""
    end = monotonic() + within
    while not happened():
        if monotonic() > end:
            return False
        sleep(0.1)
    return True


def written_and_read(writer: Actor, reader: Actor, name: str, seed: int, **more: Any) -> bool:
    """Whether a checkpoint could be written, or was there, and read."""
    there = write(writer, name, seed, **more) in THERE
    return there and read(reader, name, seed, nbytes=more.get("nbytes", NBYTES)) == seed


# nothing is broken in these: one Mooncake, a writer and a reader for all


@pytest.fixture(scope="module")
def mooncake(network: None) -> Iterator[LocalMooncake]:
    with local(segment_mib=512) as mooncake:  # nothing is evicted
        yield mooncake


@pytest.fixture(scope="module")
def pair(mooncake: LocalMooncake) -> Iterator[tuple[Actor, Actor]]:
    """A writer and a reader, and a checkpoint that was there before all, and is there after all."""
    with worker(mooncake) as writer, worker(mooncake) as reader:
        assert write(writer, "earlier", 1) == "stored"
        yield writer, reader
        assert read(reader, "earlier", 1) == 1


names = (f"checkpoint-{number}" for number in count())


def test_every_dtype_through_a_store_process(pair: tuple[Actor, Actor]) -> None:
    writer, reader = pair
    name = next(names)
    assert write(writer, name, 5, dtypes=True) == "stored"
    assert reader.do("fetch", name=name, timeout=TIMEOUT_S) == [digest(every_dtype(5)), "hit"]
    some = {leaf: every_dtype(5)[leaf] for leaf in ("bfloat16", "strided", "none")}
    found = reader.do("fetch", name=name, timeout=TIMEOUT_S, leaves=sorted(some))
    assert found == [digest(some), "hit"]


def test_every_dtype_through_the_writers_own_memory() -> None:
    with local(segment_mib=0) as mooncake, worker(mooncake, segment_bytes=32 * MIB) as writer:
        with worker(mooncake) as reader:
            assert write(writer, "here", 5, dtypes=True) == "stored"
            assert reader.do("fetch", name="here", timeout=TIMEOUT_S) == [digest(every_dtype(5)), "hit"]
            assert write(reader, "there", 6, dtypes=True) == "stored"
        assert writer.do("fetch", name="there", timeout=TIMEOUT_S) == [digest(every_dtype(6)), "hit"]


@pytest.mark.parametrize("how", ["removed", "truncated", "flipped"])
def test_each_object_in_turn_is(how: str, pair: tuple[Actor, Actor]) -> None:
    writer, reader = pair
    name = next(names)
    assert write(writer, name, 2) == "stored"
    keys = pack(contents(2, NBYTES), About(NAMESPACE, 2), PART).manifest.part_keys(name)
    assert len(keys) >= 4
    for key in [name, *keys]:
        reader.do("replace", key=key, how=how, timeout=TIMEOUT_S)
        assert read(reader, name, 2) is None, key
        assert written_and_read(writer, reader, name, 2), key


def said_to_be(nbytes: int, body: bytes) -> bytes:
    """A manifest whose header claims another length."""
    header = HEADER.pack(MAGIC, VERSION, nbytes)
    return header + xxhash.xxh3_128_digest(header + body) + body


def claims(shape: tuple[int, ...], nbytes: int) -> Manifest:
    """Of one leaf of bytes in one part."""
    leaf = Leaf("latent", "uint8", shape, (Segment(0, 0, nbytes, "0" * 32),))
    return Manifest(About(NAMESPACE, 1), parts_of([leaf]), (leaf,))


def whole(namespace: str = NAMESPACE) -> bytes:
    return encode(pack(contents(3, NBYTES), About(namespace, 3), PART).manifest).tobytes()


def with_shape(shape: tuple[int, ...]) -> bytes:
    """A manifest whose leaf has another shape than its bytes make."""
    content = json.loads(encode(claims((64,), 64)).tobytes()[BODY:])
    content["leaves"][0]["shape"] = shape
    return signed(json.dumps(content).encode())


GIB = 1 << 30
MANIFESTS = {
    "other_namespace": (whole("another"), "namespace"),
    "other_version": (signed(b"{}", version=VERSION + 1), "version"),
    "one_bit_flipped": (whole().replace(b'"boundary":3', b'"boundary":2'), "damaged manifest"),
    "not_json": (signed(b"\xff{nothing"), "damaged manifest"),
    "json_of_nothing": (signed(b"[]"), "damaged manifest"),
    "not_a_manifest": (bytes(range(256)), "damaged manifest"),
    "one_byte": (b"k", "damaged manifest"),
    "header_claims_1_gib": (said_to_be(GIB, b"{}"), "damaged manifest"),
    "part_claims_1_gib": (encode(claims((GIB,), GIB)).tobytes(), "lost part"),
    "shape_claims_1_gib": (with_shape((GIB,)), "damaged manifest"),
}


@pytest.mark.parametrize(("raw", "outcome"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_cannot_be_used(raw: bytes, outcome: str, pair: tuple[Actor, Actor]) -> None:
    writer, reader = pair
    name = next(names)
    assert writer.do("put_raw", key=name, raw=raw.hex(), timeout=TIMEOUT_S) == "stored"
    before = reader.do("peak_nbytes")
    assert reader.do("fetch", name=name, timeout=TIMEOUT_S) == [None, outcome]
    assert reader.do("peak_nbytes") - before < 64 * MIB
    # a writer puts right what is nobody's, and leaves what may be another's
    assert written_and_read(writer, reader, name, 3) == (outcome == "damaged manifest")
    assert outcome != "version" or writer.do("contains", keys=[name], timeout=TIMEOUT_S) == [True]


def test_a_short_part_that_claims_1_gib(pair: tuple[Actor, Actor]) -> None:
    writer, reader = pair
    name = next(names)
    manifest = claims((GIB,), GIB)
    assert writer.do("put_raw", key=manifest.part_keys(name)[0], raw="00" * 64, timeout=TIMEOUT_S) == "stored"
    assert writer.do("put_raw", key=name, raw=encode(manifest).tobytes().hex(), timeout=TIMEOUT_S) == "stored"
    before = reader.do("peak_nbytes")
    assert reader.do("fetch", name=name, timeout=TIMEOUT_S) == [None, "lost part"]
    assert reader.do("peak_nbytes") - before < 64 * MIB


@pytest.mark.parametrize("seeds", [(7, 7), (7, 8)], ids=["equal", "different"])
def test_two_writers_of_one_name(seeds: tuple[int, int], pair: tuple[Actor, Actor]) -> None:
    for _ in range(6):
        name = next(names)
        calls = [
            actor.begin("publish", name=name, seed=seed, timeout=TIMEOUT_S, part_nbytes=PART)
            for actor, seed in zip(pair, seeds)
        ]
        puts = [actor.finish(call, TIMEOUT_S) for actor, call in zip(pair, calls)]
        seen = read(pair[1], name, *seeds)
        if seeds[0] == seeds[1]:
            assert seen == seeds[0] and "stored" in puts and set(puts) <= set(THERE), puts
        else:
            assert seen is not None
            winner = seeds.index(seen)
            assert puts[winner] == "stored" and puts[1 - winner] == "conflict", puts
            assert read(pair[0], name, seen) == seen


@pytest.mark.parametrize("other", [9, 10], ids=["equal", "different"])
@pytest.mark.parametrize(
    ("die", "whole"),
    [
        ((1, "before"), False),
        ((1, 0.002), None),
        ((1, 0.01), None),
        ((1, 0.03), None),
        ((2, "before"), False),
        ((2, "after"), True),
    ],
    ids=["before_all", "2_ms", "10_ms", "30_ms", "before_the_manifest", "after_the_manifest"],
)
def test_a_writer_dies_and_another_writes_the_name(
    die: tuple[int, str | float],
    whole: bool | None,
    other: int,
    mooncake: LocalMooncake,
    pair: tuple[Actor, Actor],
) -> None:
    writer, reader = pair
    name, size = next(names), {"nbytes": 8 * MIB, "part_nbytes": MIB}
    with worker(mooncake) as dying:
        call = dying.begin("publish", name=name, seed=9, timeout=TIMEOUT_S, die=die, **size)
        assert isinstance(call.exception(30), Died)
        dying.wait_killed()
    left = read(reader, name, 9, nbytes=8 * MIB)
    assert whole is None or (left == 9) == whole
    if left == 9 and other != 9:
        assert write(writer, name, other, **size) == "conflict"
        assert read(reader, name, 9, nbytes=8 * MIB) == 9
        return

    def again() -> bool:
        put = write(writer, name, other, **size)
        assert put not in THERE or read(reader, name, other, nbytes=8 * MIB) == other, put
        return put in THERE

    assert until(again)


def test_close_during_gets_and_use_after_it(mooncake: LocalMooncake, pair: tuple[Actor, Actor]) -> None:
    writer, _ = pair
    name, size = next(names), 24 * MIB
    assert write(writer, name, 11, nbytes=size, part_nbytes=4 * MIB) == "stored"
    with worker(mooncake) as closing:
        gets = [closing.begin("fetch", name=name, timeout=TIMEOUT_S) for _ in range(6)]
        sleep(0.02)
        closed = [closing.begin("close") for _ in range(3)]
        for get in gets:
            reply = get.result(30)
            assert (reply.raised or "Closed").startswith("Closed"), reply.raised
            assert reply.value is None or reply.value[0] in (None, expected(11, size))
        assert [closing.finish(close, timeout=10) for close in closed] == [None] * 3
        late = [closing.begin(call, keys=["earlier"], timeout=1) for call in ("get", "contains", "remove")]
        late += [closing.begin(call, name="earlier", timeout=1) for call in ("fetch", "withdraw")]
        late += [closing.begin("put", seeds={"x": 1}, nbytes=64, timeout=1)]
        assert [(call.result(10).raised or "").partition(":")[0] for call in late] == ["Closed"] * 6


# each of these breaks a Mooncake of its own; all of them run at the same time


def the_owner_is_killed(moment: str) -> None:
    """A worker that lends memory dies around another's put. What the store process holds is not touched."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local() as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert write(writer, "earlier", 1) == "stored"
        with worker(mooncake, segment_bytes=64 * MIB) as owner:
            if moment == "before":
                owner.kill()
            call = writer.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, **size)
            if moment == "during":
                sleep(0.05)
                owner.kill()
            put = writer.finish(call, TIMEOUT_S)
            if moment == "after":
                assert put == "stored" and read(reader, "x", 2, nbytes=16 * MIB) == 2
                owner.kill()
        read(reader, "x", 2, nbytes=16 * MIB)
        assert until(lambda: read(reader, "earlier", 1) == 1, within=5)
        assert until(lambda: written_and_read(writer, reader, "x", 2, **size))
        assert read(reader, "earlier", 1) == 1


def a_writer_is_killed_that_lends_memory() -> None:
    """No store process: a worker dies within its own put, and takes what lay with it along, no more."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local(segment_mib=0) as mooncake, worker(mooncake, segment_bytes=64 * MIB) as other:
        assert write(other, "earlier", 1) == "stored"
        with worker(mooncake, segment_bytes=64 * MIB) as dying:
            call = dying.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, die=(1, 0.01), **size)
            assert isinstance(call.exception(30), Died)
            dying.wait_killed()
        assert read(other, "x", 2, nbytes=16 * MIB) is None
        assert read(other, "earlier", 1) == 1
        assert until(lambda: written_and_read(other, other, "x", 2, **size))
        assert read(other, "earlier", 1) == 1


def the_store_process_is_killed(moment: str) -> None:
    """Nobody holds memory any more: misses until there is another one."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local() as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert mooncake.store_pid is not None
        if moment == "before":
            os.kill(mooncake.store_pid, signal.SIGKILL)
        call = writer.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, **size)
        if moment == "during":
            sleep(0.03)
            os.kill(mooncake.store_pid, signal.SIGKILL)
        put = writer.finish(call, TIMEOUT_S)
        if moment == "after":
            assert put == "stored" and read(reader, "x", 2, nbytes=16 * MIB) == 2
            os.kill(mooncake.store_pid, signal.SIGKILL)
        assert moment == "after" or put not in THERE
        assert read(reader, "x", 2, nbytes=16 * MIB) is None
        mooncake.restart_store()
        assert until(lambda: written_and_read(writer, reader, "x", 2, **size))


def the_master_is_killed() -> None:
    """Nothing can be found until it is back, then nothing that was; a breaker keeps calls short in between."""
    size = {"nbytes": 16 * MIB, "part_nbytes": MIB}
    with local() as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert write(writer, "earlier", 1, **size) == "stored"
        calls = [
            (writer, writer.begin("publish", name="x", seed=2, timeout=TIMEOUT_S, **size)),
            (reader, reader.begin("fetch", name="earlier", timeout=TIMEOUT_S)),
        ]
        os.kill(mooncake.master_pid, signal.SIGKILL)
        for actor, call in calls:
            actor.finish(call, TIMEOUT_S)
        for number in range(4):
            assert write(writer, f"y{number}", 3, timeout=SHORT_S) not in THERE
            assert read(reader, "earlier", 1, timeout=SHORT_S) is None
        assert reader.do("contains", keys=["earlier"], timeout=SHORT_S) == [False]
        assert reader.do("remove", keys=["earlier"], timeout=SHORT_S) == [False]
        assert writer.do("outcomes")["opened"] >= 1 and reader.do("outcomes")["opened"] >= 1
        mooncake.restart_master()
        assert until(lambda: written_and_read(writer, reader, "x", 2, **size))
        assert read(reader, "earlier", 1, nbytes=16 * MIB) is None


def one_is_stopped(which: str) -> None:
    """It answers nobody for a while, and nothing is lost."""
    with local(ttl_s=30) as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        assert write(writer, "earlier", 1) == "stored"
        assert read(reader, "earlier", 1) == 1
        pid = mooncake.master_pid if which == "master" else mooncake.store_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(3):
                assert write(writer, f"y{number}", 3, timeout=SHORT_S) not in THERE
                assert read(reader, "earlier", 1, timeout=SHORT_S) is None
        finally:
            os.kill(pid, signal.SIGCONT)
        assert until(lambda: read(reader, "earlier", 1) == 1)
        assert until(lambda: written_and_read(writer, reader, "x", 2))
        for number in range(3):
            assert read(reader, f"y{number}", 3) in (None, 3)


def the_store_is_full() -> None:
    """What is being read stays; once there is room again, writing goes on."""
    with (
        local(segment_mib=32, lease_ms=4000) as mooncake,
        worker(mooncake) as writer,
        worker(mooncake) as reader,
    ):
        small, large = (
            {"nbytes": 6 * MIB, "part_nbytes": 2 * MIB},
            {"nbytes": 48 * MIB, "part_nbytes": 4 * MIB},
        )
        assert write(writer, "earlier", 1, **small) == "stored"
        assert read(reader, "earlier", 1, nbytes=6 * MIB) == 1
        assert write(writer, "large", 2, timeout=SHORT_S, **large) not in THERE
        assert read(reader, "large", 2, nbytes=48 * MIB) is None
        assert read(reader, "earlier", 1, nbytes=6 * MIB) == 1
        assert until(lambda: written_and_read(writer, reader, "next", 3, **small))
        for name in ("earlier", "next"):
            assert writer.do("withdraw", name=name, timeout=6)
        most = {"nbytes": 20 * MIB, "part_nbytes": 4 * MIB}
        assert until(lambda: written_and_read(writer, reader, "most", 4, **most))


def a_lease_ends_during_a_read() -> None:
    """The store process hangs in the middle of it; before it goes on, the memory that is read is another object's."""
    with local(segment_mib=32, lease_ms=1, ttl_s=30) as mooncake, worker(mooncake) as writer:
        with worker(mooncake) as reader:
            size = 20 * MIB
            assert (
                writer.do("put", seeds={"0": 0, "small": 0}, nbytes=64, timeout=TIMEOUT_S) == ["stored"] * 2
            )
            assert until(
                lambda: reader.do("get", keys=["small"], timeout=TIMEOUT_S) != [None]
            )  # they know each other
            last = 0
            for seed in range(1, 6):
                assert mooncake.store_pid is not None
                os.kill(mooncake.store_pid, signal.SIGSTOP)
                get = reader.begin("get", keys=[str(last)], timeout=8)
                sleep(0.4)
                put = writer.begin("put", seeds={str(seed): seed}, nbytes=size, timeout=8)
                sleep(0.8)
                os.kill(mooncake.store_pid, signal.SIGCONT)
                old = {64: raw_digest(0, 64), size: raw_digest(last, size)}
                assert reader.finish(get, 8)[0] in (None, *old.values())
                if writer.finish(put, 8) == ["stored"]:
                    last = seed
            outcomes = reader.do("outcomes")
            assert outcomes.get("get absent", 0) + outcomes.get("get expired", 0) >= 1, outcomes


def damage_is_found_within_a_lease() -> None:
    """It is put right at once, not when nobody has read it for as long as Mooncake keeps what was read."""
    packed = pack(contents(2, NBYTES), About(NAMESPACE, 2), PART)
    part = b"".join(piece.tobytes() for piece in packed.parts[0])
    with local(lease_ms=60_000) as mooncake, worker(mooncake) as writer, worker(mooncake) as reader:
        damaged = {"flipped": bytes([part[0] ^ 1]) + part[1:], "short": part[:-1]}
        for name, raw in damaged.items():
            key = packed.manifest.part_keys(name)[0]
            assert writer.do("put_raw", key=key, raw=raw.hex(), timeout=TIMEOUT_S) == "stored"
            assert write(writer, name, 2) == "stored"
            assert name == "short" or read(reader, name, 2) is None
            assert written_and_read(writer, reader, name, 2), name
        for name in ("found by a reader", "found by a writer"):
            key = name.replace(" ", "-")
            assert writer.do("put_raw", key=key, raw=bytes(100).hex(), timeout=TIMEOUT_S) == "stored"
            assert name == "found by a writer" or read(reader, key, 2) is None
            assert written_and_read(writer, reader, key, 2), name


MOMENTS = ("before", "during", "after")
FAULTS: dict[str, Callable[[], None]] = {
    **{
        f"owner_killed_{moment}_a_put": lambda moment=moment: the_owner_is_killed(moment)
        for moment in MOMENTS
    },
    **{
        f"store_killed_{moment}_a_put": lambda moment=moment: the_store_process_is_killed(moment)
        for moment in MOMENTS
    },
    "writer_and_owner_killed": a_writer_is_killed_that_lends_memory,
    "master_killed": the_master_is_killed,
    "master_stopped": lambda: one_is_stopped("master"),
    "store_stopped": lambda: one_is_stopped("store"),
    "store_full": the_store_is_full,
    "damage_within_a_lease": damage_is_found_within_a_lease,
    "lease_ends": a_lease_ends_during_a_read,
}


@pytest.fixture(scope="module")
def running(network: None, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """The faults that were selected, all under way."""
    wanted = {item.name.partition("[")[2].rstrip("]") for item in request.session.items}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {fault: pool.submit(FAULTS[fault]) for fault in FAULTS if fault in wanted}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, running: dict[str, Future[None]]) -> None:
    running[fault].result(120)
