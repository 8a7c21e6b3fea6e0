"""Drafts by prompt lookup: what they are, that they depend on the text alone, and that a token costs little."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from kda_jax.engine.lookup import Lookup

SHORTEST, LONGEST, PLACES = 2, 8, 5
SIZES: dict[str, Any] = dict(shortest=SHORTEST, longest=LONGEST, places=PLACES)


def naive(text: list[int], most: int, stop_tokens: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """What `Lookup` proposes, by looking at everything: the longest run, of equals the latest."""
    best = 0, 0
    ends = [end for end in range(SHORTEST, len(text)) if text[end - SHORTEST : end] == text[-SHORTEST:]]
    for end in ends[::-1][:PLACES]:
        length = next(
            (n for n in range(min(LONGEST, end)) if text[end - 1 - n] != text[-1 - n]), min(LONGEST, end)
        )
        if length > best[1]:
            best = end, length
    longer = [*text]
    for i in range(min(most, best[1])):
        longer.append(longer[best[0] + i])
        if longer[-1] in stop_tokens:
            return tuple(longer[len(text) : -1])
    return tuple(longer[len(text) :])


def tokens(text: list[int]) -> np.ndarray:
    return np.array(text, np.int32)


@pytest.mark.parametrize("vocab", [1, 2, 3, 10])
def test_proposals_are_those_of_a_look_at_everything(vocab: int) -> None:
    rng, proposed = np.random.default_rng(vocab), 0
    for length in range(1, 40):
        text = rng.integers(0, vocab, length).tolist()
        stops = frozenset({int(rng.integers(0, 2 * vocab))})
        lookup = Lookup(stop_tokens=stops, **SIZES)
        for _ in range(12):  # as the text grows by some tokens at a time
            most = int(rng.integers(0, 12))
            behind = lookup.count
            lookup.read(tokens(text), some := int(rng.integers(0, 4)))
            assert lookup.count == min(behind + some, len(text))
            got = lookup.propose(tokens(text), most)
            assert got == naive(text, most, stops)
            proposed += len(got)
            text += rng.integers(0, vocab, rng.integers(1, 4)).tolist()
    assert proposed > 100


@pytest.mark.parametrize(
    ("text", "most", "want"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 3, (4, 9, 1)),
        ([1, 2, 3, 4, 9, 2, 3], 8, (4, 9)),
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1, (7,)),
        ([5, 1, 2, 7, 5, 1, 2, 8, 5, 1, 2], 1, (8,)),
        ([7, 1, 2, 1, 2, 1, 2], 4, (1, 2, 1, 2)),
        ([3, 3, 3, 3], 3, (3, 3, 3)),
        ([1, 2, 0, 4, 9, 1, 2], 8, ()),
        ([1, 2, 3, 4, 0, 9, 1, 2, 3], 8, (4,)),
        ([1, 2, 3, 4, 5], 8, ()),
        ([1, 1], 8, ()),
        ([1], 8, ()),
        ([1, 2, 3, 4, 1, 2, 3], 0, ()),
    ],
    ids=[
        *("a run of three", "a run of two", "the longest", "the latest", "a circle", "one token"),
        *("stops at once", "stop behind a run", "nothing twice", "a pair alone", "a token", "none wanted"),
    ],
)
def test_what_followed_the_same_tokens_is_proposed(text: list[int], most: int, want: tuple[int, ...]) -> None:
    assert Lookup(stop_tokens=[0], shortest=2).propose(tokens(text), most) == want


def test_a_short_run_is_no_reason() -> None:
    text = [1, 2, 3, 4, 9, 2, 3]
    assert Lookup().propose(tokens(text), 8) == ()
    assert Lookup().propose(tokens([*text, 4]), 8) == (9, 2, 3)


def test_a_token_costs_the_same_in_a_long_text() -> None:
    """Steps of the interpreter for 200 tokens and as many proposals, behind 10,000 and behind 100,000 tokens."""

    def steps(behind: int, vocab: int) -> int:
        rng, count = np.random.default_rng(0), 0
        text = rng.integers(0, vocab, behind + 200).astype(np.int32)
        lookup = Lookup(**SIZES)
        lookup.read(text, behind)

        def trace(frame: object, event: str, argument: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for end in range(behind + 1, behind + 201):
                lookup.propose(text[:end], 8)
        finally:
            sys.settrace(before)
        return count

    for vocab in (2, 20):  # each pair stood in more places than are looked at
        assert steps(100_000, vocab) < 1.2 * steps(10_000, vocab)


@pytest.mark.parametrize("wrong", [dict(longest=2), dict(shortest=0), dict(places=0)], ids=str)
def test_bad_sizes_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="runs of 0 < shortest <= longest tokens"):
        Lookup(**wrong)
