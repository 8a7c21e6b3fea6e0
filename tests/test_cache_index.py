"""The prefix index against its naive twin, after every step of random histories."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.index import Index
from cache.node import SHORT
from cache.tier import Tier
from cache.tokens import Tokens
from cache.view import view
from cache_machine import history_settings
from naive_index import NaiveIndex, Prefix, common

prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
tiers = st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.REMOTE])


def array(tokens: Prefix) -> Tokens:
    return np.array(tokens, np.int32)


def name(prefix: Prefix) -> bytes:
    return b"page" + bytes(prefix)


def key(prefix: Prefix) -> bytes:
    return b"key" + bytes(prefix)


def snapshot(index: Index) -> list[object]:
    """Everything an index says, by value."""
    return [(at, node.edge.tolist(), *node[:3], *node[4:]) for at, node in sorted(index.nodes.items())]


class IndexMachine(RuleBasedStateMachine):
    """Both indexes take the same steps; both must say the same of every prompt."""

    @initialize(page=st.integers(1, 4))
    def start(self, page: int) -> None:
        self.index, self.naive = Index.empty(page), NaiveIndex(page)
        self.ids: dict[Prefix, int] = {}
        self.old: list[tuple[Index, list[object]]] = []
        self.now = 0.0

    def known(self, number: int) -> Prefix:
        return sorted(self.ids)[number % len(self.ids)]

    def names(self, tokens: Prefix) -> list[bytes]:
        return [name(tokens[:end]) for end in range(self.index.page, len(tokens) + 1, self.index.page)]

    @rule(tokens=prefixes, base=st.integers(0, 99), keep=st.integers(0, 12))
    def insert(self, tokens: Prefix, base: int, keep: int) -> None:
        if self.ids:
            tokens = (*self.known(base)[:keep], *tokens)
        self.now += 1
        self.index, at = self.index.insert(array(tokens), key(tokens), self.names(tokens), self.now)
        self.naive = self.naive.insert(tokens, key(tokens), self.now)
        assert self.ids.setdefault(tokens, at) == at

    @precondition(lambda self: self.ids)
    @rule(number=st.integers(0, 99), tier=tiers)
    def hold(self, number: int, tier: Tier) -> None:
        tokens = self.known(number)
        self.index, self.naive = self.index.hold(self.ids[tokens], tier), self.naive.hold(tokens, tier)

    @precondition(lambda self: self.ids)
    @rule(number=st.integers(0, 99), tier=tiers)
    def release(self, number: int, tier: Tier) -> None:
        tokens = self.known(number)
        if tier in self.naive._at(tokens).states:
            self.index, names = self.index.release(self.ids[tokens], tier)
            self.naive, freed = self.naive.release(tokens, tier)
            assert sorted(names) == sorted(map(name, freed))

    @precondition(lambda self: self.ids)
    @rule(number=st.integers(0, 99))
    def pin(self, number: int) -> None:
        tokens = self.known(number)
        self.index, self.naive = self.index.pin(self.ids[tokens]), self.naive.pin(tokens)

    @precondition(lambda self: self.ids)
    @rule(number=st.integers(0, 99))
    def unpin(self, number: int) -> None:
        tokens = self.known(number)
        if not self.naive._at(tokens).pins:
            with pytest.raises(ValueError, match="unpinned more often"):
                self.index.unpin(self.ids[tokens])
            return
        self.index, by_tier = self.index.unpin(self.ids[tokens])
        self.naive, freed = self.naive.unpin(tokens)
        assert {(n, tier) for tier, names in by_tier for n in names} == {(name(p), tier) for p, tier in freed}

    @precondition(lambda self: self.ids)
    @rule(number=st.integers(0, 99), page=st.integers(0, 99), tier=tiers)
    def strip(self, number: int, page: int, tier: Tier) -> None:
        tokens = self.known(number)
        ends = range(self.index.page, len(tokens) + 1, self.index.page)
        if not ends:
            return
        lost = tokens[: ends[page % len(ends)]]
        owners = (at for at, node in self.index.ancestors(self.ids[tokens]) if name(lost) in node.names)
        before, owner = self.naive.pages, next(owners)
        start = self.index.nodes[owner].start
        self.index, keys, names = self.index.strip(owner, tier)
        if (lost, tier) in before:
            self.naive, lost_keys, lost_pages = self.naive.strip(lost, start, tier)
            assert set(keys) == lost_keys
            assert sorted(names) == sorted(map(name, lost_pages))
        else:
            assert not keys and not names

    @precondition(lambda self: self.ids)
    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        tokens = self.known(number)
        boundary = self.naive._at(tokens)
        if boundary.states or boundary.pins:
            with pytest.raises(ValueError, match="cannot be forgotten"):
                self.index.remove(self.ids[tokens])
            return
        self.index, self.naive = self.index.remove(self.ids.pop(tokens)), self.naive.remove(tokens)

    @rule(tokens=prefixes)
    def match(self, tokens: Prefix) -> None:
        assert view(self.index, array(tokens)) == self.naive.view(tokens)

    @rule()
    def keep_version(self) -> None:
        self.old.append((self.index, snapshot(self.index)))

    @invariant()
    def says_the_same(self) -> None:
        for tokens, at in self.ids.items():
            assert view(self.index, array((*tokens, 3))) == self.naive.view((*tokens, 3))
            assert self.index.tokens(at).tolist() == list(tokens)
            assert self.index.parent(at) == self.naive.parent(tokens)
            assert set(self.index.children(at)) == self.naive.children(tokens)

    @invariant()
    def no_node_too_many(self) -> None:
        forks = {a[: common(a, b)] for a in self.ids for b in self.ids}
        surplus = len(self.index.nodes) - len({(), *self.ids, *forks})
        assert surplus == 0 or (surplus > 0 and any(b.pins for b in self.naive.boundaries))

    def teardown(self) -> None:
        for index, said in self.old:
            assert snapshot(index) == said


def test_random_histories_agree_with_the_naive_twin(cache_steps: int) -> None:
    run_state_machine_as_test(IndexMachine, settings=history_settings(cache_steps))


def edges(index: Index) -> Iterator[Tokens]:
    return (node.edge for node in index.nodes.values())


def test_pages_belong_to_the_branch_in_which_they_end() -> None:
    index, a = Index.empty(4).insert(array((1,) * 10), b"a", [b"a4", b"a8"], 0.0)
    index, b = index.insert(array((1,) * 6 + (2,) * 4), b"b", [b"a4", b"b8"], 0.0)
    index = index.hold(a, Tier.DEVICE).hold(b, Tier.DEVICE)
    assert index.release(a, Tier.DEVICE)[1] == (b"a8",)
    assert index.release(b, Tier.DEVICE)[1] == (b"b8",)
    assert index.release(a, Tier.DEVICE)[0].release(b, Tier.DEVICE)[1] == (b"a4", b"b8")


def test_edges_cannot_be_written_and_do_not_follow_the_caller_s_array() -> None:
    tokens = array((1, 2, 3, 4))
    index, at = Index.empty(2).insert(tokens, b"k", [b"2", b"4"], 0.0)
    tokens[:] = 9
    assert index.tokens(at).tolist() == [1, 2, 3, 4]
    index, _ = index.insert(array((1, 2, 3, 5)), b"l", [b"2", b"5"], 0.0)
    assert not any(edge.flags.writeable for edge in edges(index) if len(edge))


@pytest.mark.parametrize("length", [1, SHORT, SHORT + 1])
def test_short_and_long_edges_match_to_the_token(length: int) -> None:
    tokens = np.arange(length + 1, dtype=np.int32)
    index, _ = Index.empty(2 * SHORT).insert(tokens[:length], b"k", [], 0.0)
    for part in (tokens, tokens[:length], np.repeat(tokens, 2)[::2]):
        assert index.match(part).length == length
    assert index.match(tokens[: length - 1]).length == length - 1
    tokens[length - 1] += 1
    assert index.match(tokens).length == length - 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Index.empty(0), "page=0 must be positive"),
        (lambda: Index.empty(4).insert(array(()), b"k", [], 0.0), "has tokens before it"),
        (
            lambda: Index.empty(4).insert(array((1,) * 8), b"k", [b"8"], 0.0),
            "2 pages are new, got names of 1",
        ),
    ],
    ids=["page", "no tokens", "names"],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
