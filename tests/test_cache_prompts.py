"""A put that is given its prompt's match: the same keys as without, and nothing hashed that the match names."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cache import prompts
from cache.payload import Sized
from cache.retention.protocol import Kind
from cache.store import Store
from cache.tier import Tier
from cache.tokens import Media, Tokens
from cache.view import View
from cache_site import NAMESPACE, ROW, STATE, text
from oldest_first import OldestFirst

PAGE = 64
OTHER = b"o" * 32


def empty() -> Store:
    return Store.empty(
        {Tier.DEVICE: 10**6}, OldestFirst(), state_nbytes=STATE, row_nbytes=ROW, page=PAGE, share=1.0
    )


def put(
    store: Store,
    tokens: object,
    seen: View | None = None,
    *,
    namespace: bytes = NAMESPACE,
    media: tuple[Media, ...] = (),
) -> Store:
    pages = [Sized(PAGE * ROW)] * (len(tokens) // PAGE)  # type: ignore[arg-type]
    return store.put(
        namespace,
        tokens,  # type: ignore[arg-type]
        Sized(STATE),
        pages,
        kind=Kind.PROMPT_END,
        now=0.0,
        media=media,
        seen=seen,
    )


def contents(store: Store) -> tuple[set[bytes], set[bytes], set[bytes]]:
    shelf = store.shelves[Tier.DEVICE]
    return set(store.prompts.places), set(shelf.states), set(shelf.pages)


@pytest.mark.parametrize("seed", range(3))
def test_with_and_without_a_match_the_same_is_put(seed: int) -> None:
    """Prompts that go on from one another and fork, on the page and off it; some boundaries are forgotten meanwhile."""
    rng = np.random.default_rng(seed)
    told, plain, trunk = empty(), empty(), rng.integers(0, 3, 600, np.int32)
    for _ in range(25):
        keep = rng.integers(1, len(trunk))
        tokens = np.append(trunk[:keep], rng.integers(0, 3, rng.integers(1, 300), np.int32))
        seen = told.match(NAMESPACE, tokens)
        if rng.random() < 0.3:
            most = int(rng.integers(3))
            told, plain = (each.evict(Tier.DEVICE, 3000, 0.0).forget(most) for each in (told, plain))
        ends = [item.boundary for item in seen.boundaries]
        for boundary in rng.permutation([*ends, *rng.integers(1, len(tokens), 3), len(tokens)]):
            told, plain = put(told, tokens[:boundary], seen), put(plain, tokens[:boundary])
        assert contents(told) == contents(plain)
        trunk = tokens


def test_what_a_match_names_is_neither_followed_nor_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = text(1000)
    store = put(put(empty(), tokens[:500]), tokens[:900]).evict(Tier.DEVICE, 10**6, 0.0)
    seen = store.match(NAMESPACE, tokens)
    expected = put(store, tokens[:500])
    walked: list[int] = []
    match = prompts.Index.match

    def counted(index: prompts.Index, tokens: Tokens, after: int = 0) -> object:
        walked.append(index.nodes[after].stop)
        return match(index, tokens, after)

    monkeypatch.setattr(prompts.Index, "match", counted)
    further = put(store, tokens, seen)
    assert walked == [900], "the match goes on from the deepest boundary"
    assert len(further.prompts.places) == 3
    monkeypatch.setattr(prompts, "_chain", None)
    assert contents(put(store, tokens[:500], seen)) == contents(expected)
    assert walked == [900]


def overwritten(tokens: Tokens) -> Tokens:
    tokens[3] += 1
    return tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens: (tokens[::-1].copy(), NAMESPACE, ()),
        lambda tokens: (np.append(tokens[:-1], np.int32(7_777)), NAMESPACE, ()),
        lambda tokens: (tokens, OTHER, ()),
        lambda tokens: (tokens, NAMESPACE, (Media(10, b"image"),)),
        lambda tokens: (overwritten(tokens), NAMESPACE, ()),
        lambda tokens: (tokens.astype(np.int64), NAMESPACE, ()),
        lambda tokens: (tokens.tolist(), NAMESPACE, ()),
        lambda tokens: (np.repeat(tokens, 2)[::2], NAMESPACE, ()),
    ],
    ids=["backwards", "last-token", "namespace", "media", "overwritten", "int64", "list", "strided"],
)
def test_a_match_of_something_else_changes_no_key(
    change: Callable[[Tokens], tuple[object, bytes, tuple[Media, ...]]],
) -> None:
    """The array that was matched may have been written since: what counts is what is in it now."""
    tokens = text(640)
    store = put(empty(), tokens)
    seen = store.match(NAMESPACE, tokens)
    other, namespace, media = change(tokens)
    got, expected = (put(store, other, each, namespace=namespace, media=media) for each in (seen, None))
    assert contents(got) == contents(expected)


def test_numbers_of_twice_the_bytes_are_other_tokens() -> None:
    """5, 7 in eight bytes each are the bytes of 5, 0, 7, 0 in four."""
    tokens = np.zeros(256, np.int32)
    tokens[::2] = text(128)
    store = put(empty(), tokens[:128])
    seen, wide = store.match(NAMESPACE, tokens), tokens[::2].astype(np.int64)
    assert contents(put(store, wide, seen)) == contents(put(store, wide))
    assert len(put(store, wide, seen).prompts.places) == 2


def test_a_match_with_media_names_nothing() -> None:
    tokens, image = text(640), (Media(10, b"image"),)
    store = put(empty(), tokens, media=image)
    seen = store.match(NAMESPACE, tokens, image)
    assert len(seen.boundaries) == 1 and seen.prompt is None
    assert contents(put(store, tokens, seen)) == contents(put(store, tokens))
    assert len(put(store, tokens, seen).prompts.places) == 2


@pytest.mark.parametrize(("tokens", "message"), [([], "has tokens before it"), ([-1, 2], "token ids lie in")])
def test_bad_tokens_are_refused_with_a_match_too(tokens: list[int], message: str) -> None:
    seen = put(empty(), text(64)).match(NAMESPACE, text(64))
    with pytest.raises(ValueError, match=message):
        put(empty(), np.array(tokens, np.int32), seen)
