"""The learned policy: its incremental figures against a walk over everything, its versions, and what it prefers."""

from __future__ import annotations

import json
import math
import random
from itertools import islice

import pytest
from hypothesis import HealthCheck, settings

from cache.retention import Boundary, Kind, Learned
from cache.retention.forest import Forest, Remembered, serving
from cache.retention.learning import traits
from cache_machine import StoreMachine

STATE, ROW = 1000, 2
Paths = dict[bytes, tuple[str, ...]]


def boundary(
    key: str,
    tokens: int,
    parent: str | None = None,
    children: tuple[str, ...] = (),
    kind: Kind = Kind.PROMPT_END,
) -> Boundary:
    names = tuple(child.encode() for child in children)
    return Boundary(key.encode(), tokens, parent.encode() if parent else None, names, kind, 0, STATE, ROW)


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
            self.policy = self.policy.used(
                [p.encode() for p in path], hit.encode() if hit else None, self.now
            )
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
    others = {
        id(each) for held in forest.members.values() if held.held and held is not member for each in up(held)
    }
    shared = next(each for each in above if id(each) in others or each is forest.root)
    needed = id(member) in others
    freed = STATE + (0 if needed else ROW * (member.tokens - shared.tokens))
    return sum(each.stage[1] for each in serving(member)) * (member.tokens - lower.tokens) / freed


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


@pytest.mark.parametrize("seed", range(4))
def test_an_old_version_goes_on_as_if_nothing_had_come_after_it(seed: int) -> None:
    """Two plays with the same start: one from an old version, after the other, equals one that was never left."""
    first, second = Play(seed), Play(seed)
    for _ in range(60):
        first.step()
        second.step()
    old = first.policy, first.now, dict(first.known), first.rng.getstate()
    for _ in range(60):
        first.step()
    first.policy, first.now, first.known = old[0], old[1], dict(old[2])
    first.rng.setstate(old[3])
    for _ in range(60):
        first.step()
        second.step()
        assert first.known == second.known
        assert worths(first.policy) == pytest.approx(worths(second.policy), rel=1e-9)
        victims = [next(play.policy.victims(1, play.now), None) for play in (first, second)]
        least = [play.policy.worth(key, play.now) for play, key in zip((first, second), victims) if key]
        assert least == pytest.approx(least[::-1], rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_old_versions_name_the_same_victims_as_ever(seed: int) -> None:
    play, old = Play(seed), []
    for _ in range(12):
        for _ in range(10):
            play.step()
        old.append((play.policy, list(play.policy.victims(1, play.now))))
    for policy, victims in (*old, *reversed(old)):
        assert list(policy.victims(1, play.now)) == victims


@pytest.mark.parametrize("seed", range(3))
def test_who_would_go_first_is_known_before_it_is_held(seed: int) -> None:
    """Asked for its first victim alone, a version in which something is held, too, need not be laid out."""
    play, went = Play(seed), set()
    for _ in range(40):
        play.step()
        for key in (prompt.encode() for prompt, held in play.known.items() if not held):
            with play.policy._laid_out() as core:
                found = list(core.forest.trial(core.forest.members[key]))
            tried, done = (play.policy.held(key, play.now) for _ in range(2))
            victim = next(tried.victims(1, play.now))
            assert found == [(done.worth(each, play.now), each) for _, each in found]
            assert found[0][1] == key and done._version.made_of is None, "laid out from here on"
            assert victim == next(done.victims(1, play.now))
            assert list(tried.victims(1, play.now)) == list(done.victims(1, play.now))
            went.add(victim == key)
    assert went == {True, False}


def test_only_what_is_remembered_is_held() -> None:
    policy = Learned().made(boundary("a", 512), 0.0)
    with pytest.raises(KeyError):
        policy.held(b"b", 0.0)
    with pytest.raises(KeyError):
        Learned().held(b"b", 0.0)


def test_victims_come_each_as_if_those_before_it_were_dropped() -> None:
    play = Play(11)
    for _ in range(80):
        play.step()
    assert any(play.known.values())
    policy = play.policy
    for key in play.policy.victims(1, play.now):
        assert key == next(policy.victims(1, play.now))
        policy = policy.dropped(key, play.now)
    assert next(policy.victims(1, play.now), None) is None


def test_those_that_begin_with_one_empty_policy_share_no_structure() -> None:
    empty = Learned()
    one, two = (empty.made(boundary(key, 512), 0.0) for key in ("a", "b"))
    assert one._core is not two._core and not empty._core.forest.members
    assert one.held(b"a", 0.0).worth(b"a", 0.0) == two.held(b"b", 0.0).worth(b"b", 0.0)


def test_two_that_are_dropped_from_one_version_do_not_meet() -> None:
    policy = Learned()
    for key in ("a", "b", "c"):
        policy = policy.made(boundary(key, 512), 0.0).held(key.encode(), 0.0)
    without = [(key, policy.dropped(key, 0.0)) for key in (b"a", b"b", b"a")]
    assert [(key, sorted(left.victims(1, 0.0))) for key, left in without] == [
        (b"a", [b"b", b"c"]),
        (b"b", [b"a", b"c"]),
        (b"a", [b"b", b"c"]),
    ]


def test_a_failed_change_leaves_ages_as_they_were() -> None:
    policy = Learned().made(boundary("a", 512), 0.0).held(b"a", 0.0)
    with pytest.raises(KeyError):
        policy.used([b"unknown"], None, 100.0)
    other = Learned().made(boundary("a", 512), 0.0).held(b"a", 0.0)
    for _ in range(3):
        policy, other = (each.used((), None, 200.0) for each in (policy, other))
    assert policy.worth(b"a", 200.0) == other.worth(b"a", 200.0)
    assert policy.learned() == other.learned()


def requests(
    policy: Learned, times: int, path: list[str], *, start: float, every: float
) -> tuple[Learned, float]:
    """So many requests that pass these boundaries."""
    for _ in range(times):
        start += every
        policy = policy.used([key.encode() for key in path], None, start)
    return policy, start


def test_an_end_that_its_conversation_left_goes_first() -> None:
    policy, now = Learned(), 0.0
    for number in range(60):  # conversations of two turns that go on after ten seconds, once
        one, two = f"{number}a", f"{number}b"
        policy = policy.used((), None, now).made(boundary(one, 4096), now).held(one.encode(), now)
        policy = policy.used([one.encode()], one.encode(), now + 10)
        policy = policy.made(boundary(two, 8192, one), now + 10).held(two.encode(), now + 10)
        now += 15
    now -= 15
    assert next(policy.victims(1, now)) == b"0a" or policy.worth(b"59a", now) < policy.worth(b"59b", now)
    assert policy.worth(b"59a", now) < policy.worth(b"59b", now) / 10


def test_a_checkpoint_that_many_come_to_outlives_a_newer_one() -> None:
    policy = Learned().made(boundary("shared", 4096, kind=Kind.BRANCH), 0.0).held(b"shared", 0.0)
    policy, now = requests(policy, 40, ["shared"], start=0.0, every=5.0)
    policy = policy.made(boundary("new", 4096), now).held(b"new", now)
    assert list(policy.victims(1, now)) == [b"new", b"shared"]


def test_worth_counts_all_that_is_served_and_only_what_is_saved() -> None:
    policy = Learned().made(boundary("a", 1000), 0.0).made(boundary("b", 3000, "a"), 0.0).held(b"a", 0.0)
    rate_a, rate_b = (policy._core.forest.members[key].stage[1] for key in (b"a", b"b"))
    assert policy.worth(b"a", 0.0) == pytest.approx((rate_a + rate_b) * 1000 / (STATE + ROW * 1000))
    both = policy.held(b"b", 0.0)
    assert both.worth(b"a", 0.0) == pytest.approx(rate_a * 1000 / STATE), "its latents stay: b needs them"
    assert both.worth(b"b", 0.0) == pytest.approx(rate_b * 2000 / (STATE + ROW * 2000))
    again = both.dropped(b"a", 0.0)
    assert again.worth(b"b", 0.0) == pytest.approx(rate_b * 3000 / (STATE + ROW * 3000))
    with pytest.raises(KeyError):
        again.worth(b"a", 0.0)


def test_checkpoints_are_made_before_the_end_where_prompts_part_there() -> None:
    policy, now = Learned(), 0.0
    assert policy.creation.before_end, "a new policy tries all distances"
    for number in range(40):
        end = f"end{number}"
        policy = policy.used((), None, now).made(boundary(end, 5000), now)
        policy = policy.used([end.encode()], None, now + 1)
        now += 5
    assert policy.creation.before_end == ()
    for number in range(5):
        end, fork = f"end{number}", f"fork{number}"
        policy = policy.used((), None, now).made(boundary(fork, 4600, None, (end,), Kind.BRANCH), now)
    assert policy.creation.before_end == (512,)


def test_the_distance_to_an_end_is_counted_across_what_lies_between() -> None:
    policy = Learned().made(boundary("end", 5000), 0.0)
    policy = policy.made(boundary("b1", 4500, None, ("end",), Kind.BEFORE_END), 0.0)
    policy = policy.made(boundary("b2", 4000, None, ("b1",), Kind.BEFORE_END), 0.0)
    for _ in range(60):
        policy = policy.used([b"end"], None, 1.0)
    assert policy.creation.before_end == ()
    for _ in range(4):
        policy = policy.used([b"b2"], None, 2.0)
    assert policy.creation.before_end == (1024,)


def test_a_prompts_own_end_tells_nothing_of_where_it_parted() -> None:
    policy = Learned().made(boundary("old", 9000), 0.0)
    for _ in range(60):
        policy = policy.used([b"old"], None, 1.0)
    for number in range(20):
        policy = policy.used((), None, 2.0).made(boundary(f"{number}", 5000), 2.0)
        policy = policy.made(boundary(f"fork{number}", 4900, None, (f"{number}",), Kind.BRANCH), 2.0)
    assert policy.creation.before_end == ()


def test_what_was_learned_survives_a_restart() -> None:
    play = Play(5)
    for _ in range(200):
        play.step()
    written = json.loads(json.dumps(play.policy.learned()))
    again = Learned(written)
    assert again.learned() == written
    fresh = boundary("new", 512)
    held = [p.made(fresh, play.now).held(b"new", play.now) for p in (again, Learned())]
    core = play.policy._core
    core.rates.learn(core.clock)
    row = core.rates.row(traits(held[0]._core.forest.members[b"new"]))
    assert held[0].worth(b"new", play.now) == pytest.approx(
        core.rates.rate(row, 0) * 512 / (STATE + ROW * 512)
    )
    assert held[0].worth(b"new", play.now) != pytest.approx(held[1].worth(b"new", play.now), rel=0.01)


def test_what_is_held_is_not_forgotten() -> None:
    policy = Learned().made(boundary("a", 64), 0.0).held(b"a", 0.0)
    with pytest.raises(ValueError, match="dropped before it is forgotten"):
        policy.forgotten(b"a")
    assert policy.worth(b"a", 0.0) > 0


class LearnedStoreMachine(StoreMachine):
    """Random histories of a store under the laws, with this policy in every tier."""

    policy = Learned()


TestLearnedStore = LearnedStoreMachine.TestCase
TestLearnedStore.settings = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
