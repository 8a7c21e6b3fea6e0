"""The peers' rules: who goes first, and what they make."""

from __future__ import annotations

import pytest

from cache.retention import Boundary, Kind, Policy, policy


def path(made: Policy, *keys: str, parent: str | None = None) -> Policy:
    """A path of boundaries, made and held one after the other."""
    above = parent.encode() if parent else None
    for key in map(str.encode, keys):
        at = Boundary(key, 64 * len(key), above, (), Kind.PROMPT_END, 0, 10, 1)
        made, above = made.made(at, 0.0).held(key, 0.0), key
    return made


def order(made: Policy) -> str:
    return b" ".join(made.victims(1, 0.0)).decode()


def test_what_was_used_longest_ago_goes_first() -> None:
    made = path(policy("lru"), "a", "b", "c")
    assert order(made) == "a b c"
    used = made.used((b"a", b"b"), b"a", 1.0)
    assert order(used) == "b c a"
    assert order(used.used((b"a", b"b"), b"a", 2.0).dropped(b"b", 3.0)) == "c a"
    assert order(used.dropped(b"b", 2.0).held(b"b", 3.0)) == "c a b"
    assert used.worth(b"c", 1.0) < used.worth(b"a", 1.0)
    assert order(made.dropped(b"c", 1.0)) == "a b"
    assert order(made) == "a b c", "an old version has changed"


def test_a_request_that_resumes_nowhere_uses_nothing() -> None:
    made = path(policy("prompt_end"), "a", "b")
    assert order(made.used((b"a",), None, 1.0)) == "a b"


def test_a_path_over_its_cap_gives_up_its_shallowest() -> None:
    made = path(policy("path_cap:2"), "x", "a", "ab")
    assert order(path(policy("path_cap:2"), "x", "y")) == "x y"
    assert order(made) == "x a ab"
    made = path(policy("path_cap:2"), "y").used((), None, 0.0)
    made = path(made, "a", "ab", "abc")
    assert order(made) == "a y ab abc"
    assert order(path(made, "abcd", parent="abc")) == "a ab y abc abcd"
    assert order(made.dropped(b"a", 0.0)) == "y ab abc"


def test_a_path_over_its_cap_spares_forks() -> None:
    made = path(policy("path_cap:2"), "a", "ab")
    made = path(made, "ac", parent="a")
    assert order(path(made, "abc", parent="ab")) == "ab a ac abc"


def test_what_is_forgotten_leaves_its_children_to_its_parent() -> None:
    made = path(policy("path_cap:9"), "a", "ab", "abc").dropped(b"ab", 0.0).forgotten(b"ab")
    assert made.parents[b"abc"] == b"a" and made.forks[b"a"] == 1  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "kinds", "interval"),
    [
        ("interval:4096", {Kind.INTERVAL}, 4096),
        ("prompt_end", {Kind.PROMPT_END}, 0),
        ("prompt_end+branch", {Kind.PROMPT_END, Kind.BRANCH}, 0),
        ("second_use", {Kind.BRANCH, Kind.MISSING}, 0),
        ("path_cap:4", {Kind.PROMPT_END, Kind.BRANCH}, 0),
    ],
)
def test_peers_make_what_they_are_named_for(name: str, kinds: set[Kind], interval: int) -> None:
    creation = policy(name).creation
    assert (creation.kinds, creation.interval, creation.before_end) == (kinds, interval, ())


@pytest.mark.parametrize("name", ["", "best", "interval", "interval:0", "interval:-5", "path_cap:x", "lru:3"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no policy .* ours, lru, interval:N"):
        policy(name)
