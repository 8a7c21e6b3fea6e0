"""Namespaces, keys, token ids and media."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.keys import KeyChain
from cache.namespace import Namespace
from cache.tokens import Media, MediaIds, as_tokens, check_media

START = Namespace(weights=b"w", tokenizer=b"t").digest()
ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
short = st.lists(st.integers(0, 1), max_size=3)
media = st.lists(
    st.tuples(st.integers(0, 39), st.binary(min_size=1, max_size=3)), unique_by=lambda item: item[0]
)


def test_every_field_of_a_namespace_is_in_its_digest() -> None:
    plain = Namespace(weights=b"w", tokenizer=b"t", adapter=b"a", salt=b"s")
    others = [
        replace(plain, **{field.name: 2 if field.type == "int" else b"X" if field.type == "bytes" else "X"})
        for field in fields(plain)
    ]
    assert len({each.digest() for each in (plain, *others)}) == 1 + len(fields(plain))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"adapter": b"X"}, {"salt": b"X"}),
        ({"adapter": b"XY", "salt": b"Z"}, {"adapter": b"X", "salt": b"YZ"}),
        ({"topology": "tp=1", "quantisation": ""}, {"topology": "", "quantisation": "tp=1"}),
    ],
    ids=["another field", "another cut", "swapped"],
)
def test_fields_do_not_run_into_each_other(a: dict, b: dict) -> None:
    digests = [Namespace(weights=b"w", tokenizer=b"t", **fields).digest() for fields in (a, b)]
    assert digests[0] != digests[1]


def test_a_field_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="weights is str, expected bytes"):
        Namespace(weights="path", tokenizer=b"t")  # type: ignore[arg-type]


@given(tokens=ids, cuts=st.lists(st.integers(0, 40)), items=media, unit=st.integers(1, 7))
@settings(deadline=None, derandomize=True, database=None)
def test_a_chain_does_not_depend_on_how_it_was_extended(
    tokens: list[int], cuts: list[int], items: list[tuple[int, bytes]], unit: int
) -> None:
    inside = [Media(*item) for item in items if item[0] < len(tokens)]
    at_once = KeyChain.start(START, unit).extend(tokens, inside)
    chain, added, before = KeyChain.start(START, unit), [], 0
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        chain = chain.extend(tokens[before:cut], [item for item in inside if before <= item.position < cut])
        added += chain.added
        before = cut
    assert (chain.key, chain.length, tuple(added)) == (at_once.key, len(tokens), at_once.added)
    whole = len(tokens) // unit * unit
    resumed = KeyChain.resume(at_once.link, whole, unit)
    assert (
        resumed.extend(tokens[whole:], [item for item in inside if item.position >= whole]).key == chain.key
    )


@given(a=short, b=short, items=media, others=media, units=st.tuples(*[st.integers(1, 3)] * 2))
@settings(deadline=None, derandomize=True, database=None)
def test_equal_keys_mean_equal_prompts(
    a: list[int], b: list[int], items: list, others: list, units: tuple
) -> None:
    inside = [sorted(Media(*i) for i in each if i[0] < len(t)) for each, t in ((items, a), (others, b))]
    keys = [KeyChain.start(START, u).extend(t, m).key for t, m, u in zip((a, b), inside, units)]
    assert (keys[0] == keys[1]) == ((a, inside[0], units[0]) == (b, inside[1], units[1]))


def test_keys_of_all_boundaries_of_a_prompt_differ() -> None:
    chain = KeyChain.start(START, 4)
    keys = {chain.key}
    for _ in range(50):
        chain = chain.extend([0])
        keys.add(chain.key)
    assert len(keys) == 51


def test_a_key_is_what_it_was() -> None:
    """Keys name objects that outlive a process: a change here makes every stored checkpoint unreachable."""
    chain = KeyChain.start(START, 4).extend(range(10), [Media(5, b"image")])
    assert START.hex() == "ec75db8ad1dda7663f09da392c0bb51eda948c717f3d90659fce925c3399fc69"
    assert chain.added[0].hex() == "3f5bd726783fdafedd797c4755689558e6ecaed0f7baaea32fbf597e551cbeac"
    assert chain.key.hex() == "2687f032cdb0b18e9a2e4183eb9dd7719a7013a151e689c49520fdf573645543"


def test_an_extension_costs_what_it_adds() -> None:
    """It keeps the tail alone of what came before."""
    chain = KeyChain.start(START, 512).extend(np.zeros(10**6, np.int32))
    assert len(chain.tail) == 10**6 % 512
    assert chain.tail.base is None
    assert len(chain.extend(np.ones(1000, np.int32)).added) == 2


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_token_ids_of_any_integers(dtype: type) -> None:
    assert as_tokens(np.array([0, 1, 127], dtype)).tolist() == [0, 1, 127]
    if np.iinfo(dtype).min < 0:
        with pytest.raises(ValueError, match=r"lie in \[0, 2\*\*31\), got -1 to 5"):
            as_tokens(np.array([5, -1], dtype))


@pytest.mark.parametrize(
    "wrong",
    [[1.0], [[1]], [2**31], [-1], ["a"], [True]],
    ids=["float", "rows", "large", "negative", "text", "bool"],
)
def test_what_is_no_token_id_is_refused(wrong: list) -> None:
    with pytest.raises(ValueError, match="token ids"):
        as_tokens(wrong)


def test_no_tokens_are_tokens() -> None:
    assert as_tokens([]).dtype == np.int32


def test_two_short_images_are_not_one_long_one() -> None:
    known = MediaIds().know([Media(0, b"a")])
    pad = as_tokens([7] * 6)
    one, two = known.fold(pad, [Media(0, b"a")]), known.fold(pad, [Media(0, b"a"), Media(3, b"a")])
    assert one.tolist() == [-1, 7, 7, 7, 7, 7]
    assert two.tolist() == [-1, 7, 7, -1, 7, 7]
    assert pad.tolist() == [7] * 6
    assert known.know([Media(3, b"a")]) is known
    assert known.know([Media(0, b"b")]).fold(pad, [Media(0, b"b")])[0] == -2
    assert known.fold(pad, [Media(0, b"b")])[0] not in (-1, -2, 7)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([Media(1, b"a"), Media(1, b"b")], r"two media begin at one position: \[1, 1\]"),
        ([Media(4, b"a")], "outside the 4 tokens"),
        ([Media(-1, b"a")], "outside the 4 tokens"),
    ],
    ids=["one position", "behind", "before"],
)
def test_media_outside_of_the_prompt_are_refused(items: list[Media], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_media(items, 4)
    with pytest.raises(ValueError, match=message):
        KeyChain.start(START).extend([0] * 4, items)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KeyChain.start(b"short"), "a namespace has 32 bytes, got 5"),
        (lambda: KeyChain.start(START, 0), "unit=0"),
        (lambda: KeyChain.resume(START, 5, 4), "length=5 must be a multiple"),
    ],
    ids=["digest", "unit", "length"],
)
def test_a_chain_that_cannot_start(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
