"""Arrays to parts and back, and manifests that must not be believed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from transfer import About, MemoryObjects, Put, Read, fetch, packing, publish
from transfer.aligned import ALIGNMENT, align, empty, is_aligned
from transfer.beside import beside
from transfer.dtypes import DTYPES
from transfer.manifest import (
    BODY,
    HEADER,
    MAGIC,
    Manifest,
    Miss,
    Segment,
    Unreadable,
    decode,
    encode,
    parts_of,
    signed,
)
from transfer.packing import pack, runs, unpack
from transfer_site import TIMEOUT, Watched, assert_same, edited, random_array

ABOUT = About("model a", 128, "a/64")


def unpacked(
    arrays: dict[str, NDArray], part_nbytes: int, wanted: list[str] | None = None
) -> dict[str, NDArray]:
    """Packed, through the manifest's bytes, and back without a store."""
    packed = pack(arrays, ABOUT, part_nbytes)
    manifest = decode(encode(packed.manifest))
    assert manifest == packed.manifest
    parts = [np.concatenate(part) for part in packed.parts]
    assert [part.nbytes for part in parts] == [part.nbytes for part in manifest.parts]
    names = list(arrays) if wanted is None else wanted
    found = [(run, parts[run.part][run.start :][: run.nbytes].copy()) for run in runs(manifest, names)]
    return unpack(manifest, names, found)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str) -> None:
    shapes = {"matrix": (5, 7), "none": (3, 0, 2), "scalar": (), "long": (1000,)}
    arrays = {name: random_array(i, dtype, shape) for i, (name, shape) in enumerate(shapes.items())}
    assert_same(unpacked(arrays, 2048), arrays)


def test_the_dtypes_are_those_of_states() -> None:
    """What a model may hold: all of ml_dtypes that every supported version has, and numpy's numbers."""
    wanted = (
        "bool int8 uint8 int32 int64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2 int4 uint4"
    )
    assert set(wanted.split()) <= set(DTYPES)
    assert all(np.dtype(name) == dtype for name, dtype in DTYPES.items())


names = st.text(max_size=8)
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> NDArray:
    """An array that is contiguous, transposed, strided, reversed or read-only."""
    array = random_array(draw(st.integers(0, 99)), draw(st.sampled_from(sorted(DTYPES))), draw(shapes))
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "reversed", "read-only"]))
    if layout == "transposed":
        return array.T
    if array.ndim and layout == "strided":
        return array[..., ::2]
    if array.ndim and layout == "reversed":
        return array[::-1]
    array.flags.writeable = layout != "read-only"
    return array


@settings(max_examples=70, deadline=None, derandomize=True, database=None)
@given(
    arrays=st.dictionaries(names, layouts(), max_size=6),
    part_nbytes=st.sampled_from([64, 128, 320, 4096]),
    data=st.data(),
)
def test_any_arrays_come_back_through_a_store(
    arrays: dict[str, NDArray], part_nbytes: int, data: st.DataObject
) -> None:
    objects = Watched(MemoryObjects())
    assert publish(objects, "n", arrays, ABOUT, TIMEOUT, part_nbytes) is Put.STORED
    whole = fetch(objects, "n", "model a", None, TIMEOUT)
    assert whole is not None and whole.about == ABOUT
    assert_same(whole.arrays, arrays)
    some = data.draw(st.lists(st.sampled_from(sorted(arrays)), unique=True)) if arrays else []
    objects.calls.clear()
    part = fetch(objects, "n", "model a", some, TIMEOUT)
    assert part is not None
    assert_same(part.arrays, {name: arrays[name] for name in some})
    assert part.nbytes == sum(arrays[name].nbytes for name in some)
    asked = sum(read.nbytes or 0 for _, reads in objects.calls for read in reads if read.key != "n")
    assert asked <= sum(align(arrays[name].nbytes) for name in some)
    for array in [*whole.arrays.values(), *part.arrays.values()]:
        assert not array.nbytes or array.ctypes.data % ALIGNMENT == 0
        assert not array.flags.writeable


def test_leaves_and_reads_share_no_memory() -> None:
    arrays = {name: random_array(i, "float32", (100,)) for i, name in enumerate("abc")}
    objects = MemoryObjects()
    publish(objects, "n", arrays, ABOUT, TIMEOUT)
    one, two = (fetch(objects, "n", "model a", None, TIMEOUT) for _ in range(2))
    assert one is not None and two is not None
    every = [*arrays.values(), *one.arrays.values(), *two.arrays.values()]
    assert not any(np.may_share_memory(a, b) for i, a in enumerate(every) for b in every[:i])


def test_what_a_store_does_not_align_is_copied() -> None:
    arrays = {"a": random_array(0, "float32", (9,)), "b": random_array(1, "float32", (5,))}
    packed = pack(arrays, ABOUT)
    [run] = runs(packed.manifest, ["a", "b"])
    room = empty(run.nbytes + 4)
    for shift, expected in ((0, 0), (4, 56)):
        raw = room[shift : shift + run.nbytes]
        raw[:] = np.concatenate(packed.parts[0])
        got, copied = unpack(packed.manifest, ["a", "b"], [(run, raw)])
        assert copied == expected and all(is_aligned(array) for array in got.values())
        assert_same(got, arrays)


def test_contiguous_arrays_are_not_copied() -> None:
    arrays = {f"{i}": random_array(i, "bfloat16", (3, 5 + i)) for i in range(10)}
    packed = pack(arrays, ABOUT)
    pieces = [piece for part in packed.parts for piece in part]
    assert packed.copied == 0
    assert all(any(np.shares_memory(array, piece) for piece in pieces) for array in arrays.values())


def test_others_are_copied_and_counted() -> None:
    base = random_array(0, "int32", (8, 6))
    packed = pack({"t": base.T, "s": base[:, ::2], "c": base}, ABOUT)
    assert packed.copied == base.nbytes + base.nbytes // 2


def test_a_leaf_is_cut_only_if_it_is_larger_than_a_part() -> None:
    sizes = {"a": 100, "b": 30, "c": 200, "d": 256, "e": 600, "f": 40, "g": 1, "h": 192, "i": 64}
    packed = pack({name: random_array(0, "uint8", (size,)) for name, size in sizes.items()}, ABOUT, 256)
    where = {leaf.name: [s[:3] for s in leaf.segments] for leaf in packed.manifest.leaves}
    assert where == {
        "a": [(0, 0, 100)],
        "b": [(0, 128, 30)],
        "c": [(1, 0, 200)],
        "d": [(2, 0, 256)],
        "e": [(3, 0, 256), (4, 0, 256), (5, 0, 88)],
        "f": [(5, 128, 40)],
        "g": [(5, 192, 1)],
        "h": [(6, 0, 192)],
        "i": [(6, 192, 64)],
    }
    assert [part.nbytes for part in packed.manifest.parts] == [158, 200, 256, 256, 256, 193, 256]


@pytest.mark.parametrize("sizes", [[5], [100, 1, 2], [1, 2, 100], [64] * 9, [7, 0, 50, 300]], ids=str)
@pytest.mark.parametrize("together", [1, 10**9], ids=["two threads", "one"])
def test_every_run_of_bytes_has_its_digest(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], together: int
) -> None:
    monkeypatch.setattr(packing, "TOGETHER", together)
    arrays = {f"{i}": random_array(i, "uint8", (size,)) for i, size in enumerate(sizes)}
    packed = pack(arrays, ABOUT, 128)
    for leaf in packed.manifest.leaves:
        start = 0
        for segment in leaf.segments:
            raw = arrays[leaf.name][start : start + segment.nbytes]
            assert segment.digest == xxh3_128_hexdigest(raw.tobytes())
            start += segment.nbytes
    assert packed.manifest.parts == parts_of(packed.manifest.leaves)


def test_two_threads_digest_and_the_slower_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here, began = threading.get_ident(), threading.Event()

    def slow(data: memoryview) -> str:
        if threading.get_ident() == here:
            assert began.wait(TIMEOUT)
        else:
            began.set()
            time.sleep(0.05)
        return xxh3_128_hexdigest(data)

    arrays = {f"{i}": random_array(i, "uint8", (64,)) for i in range(3)}
    expected = pack(arrays, ABOUT).manifest
    monkeypatch.setattr(packing, "TOGETHER", 1)
    monkeypatch.setattr(packing, "xxhash", SimpleNamespace(xxh3_128_hexdigest=slow))
    assert pack(arrays, ABOUT).manifest == expected


def test_a_second_thread_digests_where_there_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    began = []
    monkeypatch.setattr(packing, "beside", lambda work: began.append(work) or beside(work))
    for count, expected in ((1, 0), (3, 1)):
        pack({f"{i}": random_array(i, "uint8", (packing.TOGETHER // 2 - 1,)) for i in range(count)}, ABOUT)
        assert len(began) == expected


def test_equal_arrays_pack_to_equal_bytes() -> None:
    arrays = {name: random_array(i, "int8", (70,)) for i, name in enumerate("abcd")}
    one, two = pack(arrays, ABOUT, 128), pack(dict(reversed(arrays.items())), ABOUT, 128)
    assert encode(one.manifest).tobytes() == encode(two.manifest).tobytes()


def test_parts_of_other_bytes_or_places_have_other_keys() -> None:
    zeros = {"a": np.zeros(300, np.uint8), "b": np.zeros(100, np.uint8)}
    packs = [
        pack(zeros, ABOUT, 128),
        pack(zeros | {"b": np.ones(100, np.uint8)}, ABOUT, 128),
        pack(zeros | {"b": np.zeros(99, np.uint8)}, ABOUT, 128),
        pack({"b": np.zeros(28, np.uint8), "c": np.zeros(100, np.uint8)}, ABOUT, 192),
        pack({"b": np.zeros(29, np.uint8), "c": np.zeros(100, np.uint8)}, ABOUT, 192),
    ]
    keys = [set(packed.manifest.part_keys("n")) for packed in packs]
    assert [len(found) for found in keys] == [4, 4, 4, 1, 1]
    assert len(keys[0] & keys[1]) == len(keys[0] & keys[2]) == 3
    assert keys[3] != keys[4]


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros(3, ">f4"), r"'w'.*big-endian \(>f4\).*astype\('<f4'\)"),
        (np.zeros(3, ">i2"), r"'w'.*big-endian \(>i2\)"),
        (np.array([object()]), "'w'.*dtype object"),
        (np.zeros(3, [("a", "f4"), ("b", "i4")]), "'w'.*dtype "),
        (np.array(["text"]), "'w'.*dtype <U4"),
        (np.array([b"text"]), r"'w'.*dtype \|S4"),
        (np.zeros(3, "M8[s]"), "'w'.*dtype datetime64"),
        (np.zeros(3, "V5"), r"'w'.*dtype \|V5"),
        (np.zeros(3, np.longdouble), "'w'.*dtype float128"),
        (np.ma.masked_array([1, 2], [True, False]), "'w'.*MaskedArray.*np.asarray"),
        ([1, 2], "'w'.*list.*np.asarray"),
        (3.0, "'w'.*float.*np.asarray"),
    ],
    ids=lambda value: None if isinstance(value, str) else f"{getattr(value, 'dtype', type(value).__name__)}",
)
def test_what_a_checkpoint_does_not_hold_is_refused_by_name(array: Any, match: str) -> None:
    objects = Watched(MemoryObjects())
    with pytest.raises(ValueError, match=match):
        publish(objects, "n", {"a": np.zeros(3), "w": array}, ABOUT, TIMEOUT)
    assert objects.calls == []


@pytest.mark.parametrize(
    ("about", "part_nbytes", "match"),
    [
        (ABOUT, 0, "part_nbytes=0"),
        (ABOUT, 100, "part_nbytes=100.*64"),
        (ABOUT, -64, "part_nbytes=-64"),
        (ABOUT._replace(boundary=-1), 64, "boundary.*-1"),
        (ABOUT._replace(boundary=np.int64(3)), 64, "boundary"),  # type: ignore[arg-type]
        (ABOUT._replace(namespace=b"n"), 64, "namespace"),  # type: ignore[arg-type]
        (ABOUT._replace(parent=3), 64, "parent"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_refused(about: About, part_nbytes: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack({"a": np.zeros(3)}, about, part_nbytes)


def sample_arrays() -> dict[str, NDArray]:
    """In two parts: a leaf in both, one in the second, one of no bytes."""
    shapes = {"a": (150,), "b": (5,), "c": (2, 0)}
    return {name: random_array(1, "int8", shape) for name, shape in shapes.items()}


def sample() -> Manifest:
    return pack(sample_arrays(), ABOUT, 128).manifest


def test_a_manifest_with_any_bit_flipped_is_refused() -> None:
    raw = encode(sample())
    for bit in range(raw.nbytes * 8):
        flipped = raw.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Unreadable):
            decode(flipped)


def test_a_manifest_that_was_cut_or_grew_is_refused() -> None:
    raw = encode(sample())
    for nbytes in range(raw.nbytes):
        with pytest.raises(Unreadable):
            decode(raw[:nbytes])
    with pytest.raises(Unreadable):
        decode(np.append(raw, np.uint8(0)))


def leaf(index: int, **fields: Any) -> Callable[[Any], None]:
    """Edits a leaf of the content."""
    return lambda content: content["leaves"][index].update(fields)


def segment(index: int, number: int, **fields: Any) -> Callable[[Any], None]:
    """Edits a segment of a leaf."""
    return lambda content: content["leaves"][index]["segments"][number].update(fields)


GIB = 2**30
LIES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda content: [1],
    "a number": lambda content: 17,
    "no leaves": lambda content: content.pop("leaves") and None,
    "leaves of another kind": lambda content: content.update(leaves={"a": 1}),
    "no namespace": lambda content: content.pop("namespace") and None,
    "namespace": lambda content: content.update(namespace=None),
    "boundary below 0": lambda content: content.update(boundary=-1),
    "boundary true": lambda content: content.update(boundary=True),
    "boundary 1.0": lambda content: content.update(boundary=1.0),
    "parent": lambda content: content.update(parent=5),
    "parent false": lambda content: content.update(parent=False),
    "one part fewer": lambda content: content["parts"].pop() and None,
    "a part more": lambda content: content["parts"].append(content["parts"][0]),
    "part of 1 GiB": lambda content: content["parts"][0].update(nbytes=GIB),
    "part's digest": lambda content: content["parts"][0].update(digest="0" * 32),
    "part's key": lambda content: content["parts"][0].update(digest="../secret"),
    "a leaf twice": lambda content: content["leaves"].append(content["leaves"][2]),
    "name": leaf(0, name=3),
    "dtype unknown": leaf(0, dtype="float33"),
    "dtype a list": leaf(0, dtype=[]),
    "dtype wider": leaf(0, dtype="float32"),
    "shape larger": leaf(0, shape=[151]),
    "shape of 1 GiB": leaf(0, shape=[GIB]),
    "shape negative": leaf(0, shape=[-1, -150]),
    "shape of floats": leaf(0, shape=[150.0]),
    "shape no list": leaf(0, shape=150),
    "shape of 65 axes": leaf(2, shape=[0] * 65),
    "shape none can have": leaf(2, shape=[0, 2**62, 4]),
    "shape beyond integers": leaf(2, shape=[0, 10**4000]),
    "shape nan": leaf(0, shape=[float("nan")]),
    "no segments": leaf(0, segments=[]),
    "segment before the start": segment(0, 0, offset=-64),
    "segment later": segment(1, 0, offset=128),
    "segments overlap": segment(1, 0, offset=0),
    "segment not aligned": segment(1, 0, offset=23),
    "segment in a far part": segment(1, 0, part=1000),
    "segment in an earlier part": segment(1, 0, part=0),
    "segment of nothing": leaf(2, segments=[{"part": 1, "offset": 128, "nbytes": 0, "digest": "0" * 32}]),
    "segment of 1 GiB": segment(1, 0, nbytes=GIB),
    "segment's digest": segment(1, 0, digest=None),
    "segment without a part": lambda content: content["leaves"][0]["segments"][0].pop("part") and None,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_says_what_cannot_be_is_refused(lie: str) -> None:
    raw = encode(sample()).tobytes()
    assert decode(np.frombuffer(edited(raw, lambda content: None), np.uint8)) == sample()
    with pytest.raises(Unreadable) as caught:
        decode(np.frombuffer(edited(raw, LIES[lie]), np.uint8))
    assert caught.value.miss is Miss.DAMAGED


@pytest.mark.parametrize(
    ("leaf", "number", "fields"),
    [
        (0, 0, {"offset": 64}),
        (0, 0, {"part": 1}),
        (0, 1, {"part": 2}),
        (0, 1, {"offset": 64}),
        (1, 0, {"offset": 0}),
        (1, 0, {"offset": 22}),
        (1, 0, {"offset": 128}),
        (1, 0, {"part": 0, "offset": 64}),
        (1, 0, {"part": 3, "offset": 0}),
        (2, 0, {"part": 1, "offset": 128, "nbytes": 0}),
        (2, 0, {"part": 2, "offset": 0, "nbytes": 0}),
    ],
    ids=str,
)
def test_segments_that_lie_elsewhere_are_refused(leaf: int, number: int, fields: dict[str, int]) -> None:
    """Also if the parts are those that such segments make."""
    manifest = sample()
    old = manifest.leaves[leaf]
    segments = list(old.segments) or [Segment(0, 0, 0, "0" * 32)]
    segments[number] = segments[number]._replace(**fields)
    leaves = [*manifest.leaves]
    leaves[leaf] = old._replace(segments=tuple(segments))
    with pytest.raises(Unreadable, match="not where the one before it ends"):
        decode(encode(manifest._replace(leaves=tuple(leaves), parts=parts_of(leaves))))


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Where everything in a JSON value is."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *path) for key, one in inner for path in paths(one))]


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """A JSON value with another one in one place."""
    if not path:
        return other
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], other)
    return copy


STRANGE = [
    True,
    -1,
    0,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    0.5,
    float("inf"),
    "",
    "\ud800",
    [],
    [[]],
    {},
]


@pytest.mark.parametrize("other", STRANGE, ids=lambda value: f"{value!r:.12}")
def test_any_value_in_any_place_is_refused_or_possible(other: Any) -> None:
    """Possible: another name, or another shape of no elements. Then the parts can be unpacked as it says."""
    packed = pack(sample_arrays(), ABOUT, 128)
    raw, parts = encode(packed.manifest).tobytes(), [np.concatenate(part) for part in packed.parts]
    for path in paths(json.loads(raw[BODY:])):
        changed = edited(raw, lambda content, path=path: replaced(content, path, other))
        try:
            got = decode(np.frombuffer(changed, np.uint8))
        except Unreadable as error:
            assert error.miss is Miss.DAMAGED
            continue
        names = [leaf.name for leaf in got.leaves]
        found = [(run, parts[run.part][run.start :][: run.nbytes]) for run in runs(got, names)]
        arrays = unpack(got, names, found)[0]
        assert {name: array.shape for name, array in arrays.items()} == {
            leaf.name: leaf.shape for leaf in got.leaves
        }
        assert [a.tobytes() for a in arrays.values()] == [a.tobytes() for a in sample_arrays().values()]


@pytest.mark.parametrize(
    ("raw", "miss"),
    [
        (signed(b"not json"), Miss.DAMAGED),
        (signed(b""), Miss.DAMAGED),
        (signed(b"\xff\xfe"), Miss.DAMAGED),
        (signed(b"[" * 100_000), Miss.DAMAGED),
        (signed(b'{"boundary": ' + b"9" * 10_000 + b"}"), Miss.DAMAGED),
        (signed(b"{}", magic=b"otherCP!"), Miss.DAMAGED),
        (signed(b"{}", version=2), Miss.VERSION),
        (signed(b"{}", version=0), Miss.VERSION),
        (HEADER.pack(MAGIC, 1, GIB) + bytes(16), Miss.DAMAGED),
        (b"\0", Miss.DAMAGED),
    ],
    ids=[
        "text",
        "nothing",
        "not utf-8",
        "deep",
        "huge",
        "magic",
        "version 2",
        "version 0",
        "1 GiB",
        "a byte",
    ],
)
def test_what_is_no_manifest_is_refused(raw: bytes, miss: Miss) -> None:
    with pytest.raises(Unreadable) as caught:
        decode(np.frombuffer(raw, np.uint8))
    assert caught.value.miss is miss


def test_a_manifest_is_json_behind_its_header() -> None:
    content = json.loads(encode(sample()).tobytes()[BODY:])
    assert (content["namespace"], content["boundary"], content["parent"]) == ABOUT
    assert [part["nbytes"] for part in content["parts"]] == [128, 69]


def test_a_flipped_bit_of_a_leaf_is_found_and_padding_is_nobodys() -> None:
    arrays = {"a": random_array(1, "int8", (40,)), "b": random_array(2, ml_dtypes.bfloat16.__name__, (9,))}
    packed = pack(arrays, ABOUT)
    part, leaves_bits = np.concatenate(packed.parts[0]), {*range(40 * 8), *range(64 * 8, 82 * 8)}
    for bit in range(part.nbytes * 8):
        flipped = part.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        [run] = runs(packed.manifest, ["a", "b"])
        if bit in leaves_bits:
            with pytest.raises(Unreadable, match="damaged part"):
                unpack(packed.manifest, ["a", "b"], [(run, flipped)])
        else:
            assert_same(unpack(packed.manifest, ["a", "b"], [(run, flipped)])[0], arrays)


def test_only_the_bytes_of_wanted_leaves_are_looked_at() -> None:
    arrays = {name: random_array(i, "int8", (64,)) for i, name in enumerate("abcd")}
    objects = Watched(MemoryObjects())
    publish(objects, "n", arrays, ABOUT, TIMEOUT)
    objects.calls.clear()
    assert fetch(objects, "n", "model a", ["a", "b", "d"], TIMEOUT) is not None
    [key] = pack(arrays, ABOUT).manifest.part_keys("n")
    assert objects.calls == [("get", [Read("n")]), ("get", [Read(key, 0, 128), Read(key, 192, 64)])]
