"""The learned policy: its incremental figures against a walk over everything, its versions, and what it prefers."""

from __future__ import annotations

import json
import math
import random
from itertools import islice

import numpy as np
import pytest

from cache.retention import Boundary, Kind, Learned
from cache.retention.forest import Forest, Remembered, serving
from cache.retention.learned import traits

STATE, ROW = 1000, 2
Paths = dict[bytes, tuple[str, ...]]


def boundary(
    key: str, tokens: int, parent: str | None = None, children: tuple[str, ...] = (), kind: Kind = Kind.PROMPT_END
) -> Boundary:
    names = tuple(child.encode() for child in children)
    return Boundary(key.encode(), tokens, parent and parent.encode(), names, kind, 0, STATE, ROW)


class Play:
    """Random requests for prompts out of a small tree of letters, told to a policy as a store would."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.policy, self.now = Learned(), 0.0
        self.known: dict[str, bool] = {}
        """Prompts that are boundaries, and whether they are held."""

    def around(self, prompt: str) -> tuple[str | None, tuple[str, ...]]:
        before = [other for other in self.known if other != prompt and prompt.startswith(other)]
        parent = max(before, key=len, default=None)
        behind = [other for other in self.known if other != prompt and other.startswith(prompt)]
        nearest = [o for o in behind if not any(o != p and o.startswith(p) for p in behind)]
        return parent, tuple(nearest)

    def make(self, prompt: str, kind: Kind) -> None:
        if prompt and prompt not in self.known:
            made = boundary(prompt, 512 * len(prompt), *self.around(prompt), kind)
            self.policy = self.policy.made(made, self.now)
            self.known[prompt] = False

    def hold(self, prompt: str, held: bool) -> None:
        if self.known.get(prompt, held) != held:
            event = self.policy.held if held else self.policy.dropped
            self.policy = event(prompt.encode(), self.now)
            self.known[prompt] = held

    def step(self) -> None:
        rng = self.rng
        self.now += rng.expovariate(0.3)
        act = rng.random()
        if act < 0.6 or not self.known:
            prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 7)))
            path = sorted((p for p in self.known if prompt.startswith(p)), key=len)
            hit = next((p for p in reversed(path) if self.known[p]), None)
            self.policy = self.policy.used([p.encode() for p in path], hit and hit.encode(), self.now)
            self.make(prompt, Kind.PROMPT_END)
            self.make(prompt[: rng.randint(0, len(prompt))], Kind.BRANCH)
            self.hold(prompt, True)
        elif act < 0.9:
            for key in list(islice(self.policy.victims(1, self.now), rng.randint(1, 3))):
                self.hold(key.decode(), False)
        elif idle := [prompt for prompt, held in self.known.items() if not held]:
            gone = rng.choice(idle)
            self.policy = self.policy.forgotten(gone.encode())
            del self.known[gone]


def worths(policy: Learned) -> dict[bytes, float]:
    """The worth of all that is held, with nothing taken from the sums and sets that are kept up to date."""
    forest = policy._core.forest
    with policy._laid_out():
        return {key: worth(forest, member) for key, member in forest.members.items() if member.held}


def worth(forest: Forest, member: Remembered) -> float:
    above = [member.parent]
    while above[-1] is not forest.root:
        above.append(above[-1].parent)
    lower = next(each for each in above if each.held)
    others = {id(each) for held in forest.members.values() if held.held and held is not member for each in up(held)}
    shared = next(each for each in above if id(each) in others or each is forest.root)
    needed = id(member) in others
    freed = STATE + (0 if needed else ROW * (member.tokens - shared.tokens))
    return sum(each.rate for each in serving(member)) * (member.tokens - lower.tokens) / freed


def up(member: Remembered) -> list[Remembered]:
    """A boundary and all before it."""
    path = [member]
    while path[-1].key:
        path.append(path[-1].parent)
    return path


@pytest.mark.parametrize("seed", range(6))
def test_incremental_worth_is_the_worth_from_scratch(seed: int) -> None:
    play = Play(seed)
    for _ in range(150):
        play.step()
        expected = worths(play.policy)
        assert expected.keys() == {prompt.encode() for prompt, held in play.known.items() if held}
        for key, value in expected.items():
            assert math.isclose(play.policy.worth(key, play.now), value, rel_tol=1e-9, abs_tol=1e-15)
        if expected:
            victim = next(play.policy.victims(1, play.now))
            assert expected[victim] <= min(expected.values()) * (1 + 1e-9) + 1e-15


