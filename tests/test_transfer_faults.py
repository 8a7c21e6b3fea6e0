"""What may be wrong with a checkpoint in Mooncake, with real processes: a miss, or a retry that succeeds.

Never wrong bytes, a call beyond its deadline, a crash, or the loss of what was there before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from time import sleep

import pytest
import xxhash

from transfer import About
from transfer.manifest import BODY, HEADER, MAGIC, VERSION, Leaf, Manifest, Segment, encode, parts_of, signed
from transfer.mooncake.local import LocalMooncake
from transfer.packing import pack
from transfer_actor import (
    MIB,
    NBYTES,
    PART,
    THERE,
    TIMEOUT_S,
    Actor,
    Died,
    expected,
    local,
    read,
    until,
    worker,
    write,
    written_and_read,
)
from transfer_stage import NAMESPACE, contents, digest, every_dtype


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LocalMooncake]:
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


def test_damage_is_put_right_within_a_lease() -> None:
    """At once, not when nobody has read it for as long as Mooncake keeps what was read."""
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
        ((5, "after"), False),
        ((9, "before"), False),
        ((9, "after"), True),
    ],
    ids=["before_all", "2_ms", "10_ms", "30_ms", "half", "before_the_manifest", "after_the_manifest"],
)
def test_a_writer_dies_and_another_writes_the_name(
    die: tuple[int, str | float],
    whole: bool | None,
    other: int,
    mooncake: LocalMooncake,
    pair: tuple[Actor, Actor],
) -> None:
    """It puts 8 parts, then the manifest."""
    writer, reader = pair
    name, size = next(names), {"nbytes": 8 * MIB, "part_nbytes": MIB}
    with worker(mooncake) as dying:
        call = dying.begin("publish", name=name, seed=9, timeout=TIMEOUT_S, die=die, **size)
        with suppress(Died):  # it may have been quick
            call.result(30)
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
