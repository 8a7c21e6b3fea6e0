"""Versions of a structure that is changed in place."""

from __future__ import annotations

import random

import pytest

from cache.retention.versions import Journal, Version


class Box:
    def __init__(self) -> None:
        self.number = 0
        self.items: dict[str, int] = {}


def write(journal: Journal, box: Box, rng: random.Random) -> None:
    journal.set(box, "number", rng.randrange(1000))
    key = rng.choice("abcde")
    if key in box.items and rng.random() < 0.5:
        journal.remove(box.items, key)
    else:
        journal.put(box.items, key, rng.randrange(1000))


def change(journal: Journal, box: Box, start: Version, rng: random.Random) -> Version:
    journal.lay_out(start)

    def act() -> None:
        for _ in range(rng.randrange(4)):
            write(journal, box, rng)

    return journal.change(start, act)


@pytest.mark.parametrize("seed", range(4))
def test_every_version_stays_what_it_was(seed: int) -> None:
    rng, journal, box = random.Random(seed), Journal(), Box()
    versions = [(journal.current, 0, {})]
    for _ in range(200):
        start = rng.choice(versions)[0] if rng.random() < 0.3 else versions[-1][0]
        versions.append((change(journal, box, start, rng), box.number, dict(box.items)))
        version, number, items = rng.choice(versions)
        journal.lay_out(version)
        assert (box.number, box.items) == (number, items)


def test_a_change_that_fails_changes_nothing() -> None:
    journal, box = Journal(), Box()
    version = journal.change(journal.current, lambda: journal.put(box.items, "a", 1))

    def fail() -> None:
        journal.put(box.items, "a", 2)
        journal.put(box.items, "b", 3)
        journal.remove(box.items, "a")
        journal.set(box, "number", 4)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        journal.change(version, fail)
    assert (box.number, box.items, journal.current) == (0, {"a": 1}, version)
