"""Finding checkpoints: against a scan of every boundary, over trees of prompts that share what is before a fork."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KeyChain, Namespace
from transfer import (
    About,
    Bytes,
    Counters,
    Found,
    Item,
    Ladder,
    MemoryObjects,
    Put,
    Read,
    announce,
    fetch,
    find,
    publish,
    withdraw,
)
from transfer.finding import EARLY, LATER
from transfer.marks import LADDER, LISTED, Mark, decode, encode, marks_of, spread
from transfer_site import STORES, TIMEOUT, Watched, assert_same, item, random_array

MILLION = 2**20
SMALL = Ladder(coarse=16, fine=4)
FULL = encode([1])


class Prompt(NamedTuple):
    """A prompt by where it left others: `forks` are (tokens before it, which branch), from the first token on."""

    forks: tuple[tuple[int, int], ...] = ((0, 0),)

    def key(self, boundary: int) -> str:
        """The same for all prompts that share the tokens before `boundary`, and for no others."""
        shared = [fork for fork in self.forks if fork[0] < boundary]
        return hashlib.blake2b(repr((boundary, shared)).encode(), digest_size=16).hexdigest()

    def branch(self, at: int, number: int) -> Prompt:
        """The prompt that leaves this one behind its first `at` tokens."""
        return Prompt((*(fork for fork in self.forks if fork[0] < at), (at, number)))


class Site:
    """A store of objects as a dict that counts, with the checkpoints in it, and a few words for what tests do."""

    def __init__(self, ladder: Ladder = LADDER, probes: int = 500) -> None:
        self.values: dict[str, Bytes] = {}
        self.boundaries: set[int] = set()
        self.ladder, self.probes, self.delay = ladder, probes, 0.0
        self.calls = self.asked = self.leased = 0

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        puts = [Put.HELD if key in self.values else Put.STORED for key, _, _ in items]
        for key, pieces, _ in items:
            self.values.setdefault(key, np.concatenate(pieces))
        return puts

    def get(self, reads: Sequence[Read], timeout: float) -> list[Bytes | None]:
        self._count([read.key for read in reads])
        return [
            None if (value := self.values.get(key)) is None else value[start:][:nbytes]
            for key, start, nbytes in reads
        ]

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        self._count(keys)
        return [key in self.values for key in keys]

    def remove(self, keys: Sequence[str], timeout: float, force: bool = False) -> list[bool]:
        return [self.values.pop(key, None) is not None or True for key in keys]

    def counters(self) -> Counters:
        return Counters()

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def _count(self, keys: Sequence[str]) -> None:
        assert len(set(keys)) == len(keys), "asked twice in one call"
        time.sleep(self.delay)
        self.calls, self.asked = self.calls + 1, self.asked + len(keys)
        self.leased += sum(not key.startswith("mark/") and key in self.values for key in keys)

    def store(self, prompt: Prompt, *boundaries: int, known: Iterable[int] | None = None) -> None:
        """Stores checkpoints and their marks, by somebody who has looked for what is there before."""
        if known is None:
            known = self.find(prompt, max(boundaries)).known
        self.put([Item(prompt.key(at), [FULL]) for at in boundaries], 1.0)
        self.boundaries.update(boundaries)
        announce(self, prompt.key, boundaries, known, 1.0, self.ladder)

    def find(self, prompt: Prompt, limit: int) -> Found:
        """What is found, with its counts checked."""
        self.calls = self.asked = self.leased = 0
        found = find(self, prompt.key, limit, 60.0, self.probes, self.ladder)
        assert (found.rounds, found.probes) == (self.calls, self.asked)
        assert found.rounds <= 3 and found.probes <= self.probes
        for at in found.boundaries:
            assert at <= limit and prompt.key(at) in self.values
        return found

    def all(self, prompt: Prompt, limit: int, marked: bool = False) -> list[int]:
        """The oracle: every checkpoint of the prompt, deepest first; `marked` for those with both marks alone."""
        stored = [at for at in self.boundaries if at <= limit and prompt.key(at) in self.values]
        return sorted((at for at in stored if not marked or self.has_marks(prompt, at)), reverse=True)

    def has_marks(self, prompt: Prompt, boundary: int) -> bool:
        return all(mark.key(prompt.key) in self.values for mark in marks_of([boundary], (), self.ladder))

    def evict_marks(self, prompt: Prompt, *boundaries: int) -> None:
        for mark in marks_of(boundaries, (), self.ladder):
            self.values.pop(mark.key(prompt.key), None)

    def evict(self, prompt: Prompt, *boundaries: int) -> None:
        for at in boundaries:
            del self.values[prompt.key(at)]

    def check_deepest(self, prompt: Prompt, limit: int) -> Found:
        """Looks, and compares with the oracle; then the search has to know that it is complete."""
        found = self.find(prompt, limit)
        assert list(found.boundaries[:1]) == self.all(prompt, limit)[:1]
        assert found.complete
        return found


def session(site: Site, length: int, seed: int, turn: int = 8000) -> tuple[Prompt, list[int]]:
    """A conversation of many turns, each stored at its prompt's end on a grid of 64 and at its own end."""
    rng, prompt, ends = random.Random(seed), Prompt(), [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + rng.randint(100, turn)))
        known = {at for end in ends[1:-1] for at in (end // 64 * 64, end)}
        site.store(prompt, *({ends[-1] // 64 * 64, ends[-1]} - {0}), known=known)
    return prompt, ends[1:]


# ---- random trees

steps = st.lists(
    st.tuples(
        st.integers(0, 99),  # which prompt it leaves
        st.integers(0, 120),  # where
        st.lists(st.integers(1, 120), min_size=1, max_size=3),  # boundaries that are stored
        st.booleans(),  # whether its writer looks first
    ),
    min_size=1,
    max_size=12,
)


def grow(site: Site, tree: list[tuple[int, int, list[int], bool]]) -> list[Prompt]:
    """A tree of prompts of 120 tokens."""
    prompts = [Prompt()]
    for number, (parent, at, boundaries, looks) in enumerate(tree, 1):
        prompts.append(prompts[parent % len(prompts)].branch(at, number))
        site.store(prompts[-1], *set(boundaries), known=None if looks else ())
    return prompts


@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps, st.integers(1, 120))
def test_any_tree_with_enough_probes(tree: list[tuple[int, int, list[int], bool]], limit: int) -> None:
    site = Site(SMALL, probes=10_000)
    for prompt in grow(site, tree):
        site.check_deepest(prompt, limit)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps, st.integers(1, 120), st.integers(50, 90), st.randoms(use_true_random=False))
def test_any_tree_with_few_probes_and_losses(
    tree: list[tuple[int, int, list[int], bool]], limit: int, probes: int, rng: random.Random
) -> None:
    site = Site(SMALL, probes=10_000)
    prompts = grow(site, tree)
    site.probes = probes
    for key in sorted(site.values):
        if rng.random() < 0.2:
            del site.values[key]
        elif key.startswith("mark/") and rng.random() < 0.1:
            site.values[key] = (
                np.frombuffer(rng.randbytes(4 * LISTED), np.uint8) % 2
            )  # names what nobody stored
    for prompt in prompts:
        found = site.find(prompt, limit)
        if found.complete:
            assert list(found.boundaries[:1]) >= site.all(prompt, limit, marked=True)[:1]


# ---- a million tokens


def test_nothing_costs_one_call() -> None:
    found = Site().find(Prompt(), MILLION - 1)
    assert found == Found(rounds=1, probes=256)


def test_a_long_session_at_any_limit() -> None:
    site = Site()
    prompt, ends = session(site, MILLION - 1, seed=1)
    rng = random.Random(2)
    limits = [
        MILLION - 1,
        ends[0],
        ends[0] - 1,
        *ends[100:104],
        *(rng.randint(1, MILLION) for _ in range(20)),
    ]
    for limit in limits:
        site.check_deepest(prompt, limit)


@pytest.mark.parametrize(
    ("fork", "after"), [(905_123, 30), (905_216, 5000), (700, 30), (640, 5000), (63, 30)], ids=str
)
def test_ten_thousand_siblings(fork: int, after: int) -> None:
    """All leave one prompt at one place; the second one fills it, on the grid."""
    site, rng = Site(), random.Random(fork)
    shared, ends = session(site, fork // 2 + 1, seed=3)
    site.store(shared, MILLION)
    for number in range(1, 10_001):
        sibling = shared.branch(fork, number)
        filled = [fork // 64 * 64] if number == 2 and fork >= 64 else []
        site.store(sibling, fork + rng.randint(1, after), *filled, known=ends)
    found = site.check_deepest(shared.branch(fork, 0), MILLION - 1)
    assert found.boundaries[0] >= fork // 64 * 64 or fork < 64
    assert site.leased <= 10


@pytest.mark.parametrize("every", [4096, 1000, 64], ids=str)
def test_siblings_that_leave_everywhere(every: int) -> None:
    """Each stores behind where it leaves; lists name what lies on the prompt itself."""
    site, rng = Site(), random.Random(every)
    shared, own = Prompt(), [70_001, 300_000, 300_007]
    site.store(shared, *own)
    for number, at in enumerate(range(every, 400_000, every), 1):
        site.store(shared.branch(at, number), at + rng.randint(1, 50), known=[t for t in own if t <= at])
    for fork in (399_999, 300_500, 300_007, 250_000, 70_000):
        found = site.find(shared.branch(fork, 0), MILLION - 1)
        assert list(found.boundaries[:1]) == site.all(shared.branch(fork, 0), MILLION - 1)[:1]


@pytest.mark.parametrize("first", [True, False], ids=["listed", "unlisted"])
def test_below_more_siblings_than_fine_marks_are_read_for(first: bool) -> None:
    """Found if its own coarse mark lists it, which the one who came first has written; else it is told."""
    site, shared = Site(), Prompt()
    if not first:
        site.store(shared.branch(69_700, 99), 72_000, known=())
    site.store(shared, 70_016, known=())
    for number, at in enumerate(range(100_000, 900_000, 10_000), 1):
        site.store(shared.branch(at, number), at + 500, known=())
    found = site.find(shared.branch(905_000, 0), MILLION - 1)
    assert found.boundaries == ((70_016,) if first else ()) and not found.complete


@pytest.mark.parametrize(("boundary", "found"), [(39_936, (39_936,)), (39_940, ())], ids=["grid", "tail"])
def test_below_more_siblings_than_are_looked_through(boundary: int, found: tuple[int, ...]) -> None:
    """Listed nowhere, under the same marks as a sibling's: found only where the fine mark lies, and no other is missed
    without a word."""
    site, shared = Site(), Prompt()
    for number, at in enumerate(range(39_936, 40_640, 64), 1):
        site.store(shared.branch(at + 10, number), at + 40, known=())
    site.store(shared, boundary, known=())
    ended = site.find(shared.branch(41_000, 0), 45_000)
    assert ended.boundaries == found and not ended.complete


def test_unlisted_among_too_many_siblings_is_a_miss_that_is_told() -> None:
    site, shared = Site(), Prompt()
    for number, at in enumerate(range(1000, 905_000, 500), 1):
        site.store(shared.branch(at, number), at + 40, known=())
    site.store(shared, 450_016, known=())
    found = site.find(shared, 905_000)
    assert not found.boundaries and not found.complete
    assert site.check_deepest(shared, 451_000).boundaries == (450_016,)


@pytest.mark.parametrize("fill", [400_000, 400_001, 399_999, 402_000], ids=str)
@pytest.mark.parametrize("beyond", [0, 1, 70, 5000, 300_000], ids=str)
def test_a_boundary_filled_later(fill: int, beyond: int) -> None:
    """One prompt is stored at its end alone, another leaves it and fills; a third leaves it there or later."""
    site, shared = Site(), Prompt()
    site.store(shared, 905_000)
    site.store(shared.branch(fill, 1), fill, fill + 3000)
    site.check_deepest(shared.branch(fill + beyond, 2), MILLION - 1)


@pytest.mark.parametrize("boundary", [1, 63, 64, 65, 4095, 4096, 4097, 777_777, MILLION - 1], ids=str)
def test_exact_tails(boundary: int) -> None:
    """A second checkpoint under the same marks, which do not list it."""
    site, prompt = Site(), Prompt()
    site.store(prompt, max(boundary - 1, 1), known=())
    site.store(prompt, boundary, known=())
    site.check_deepest(prompt, MILLION - 1)
    site.check_deepest(prompt, boundary)
    site.check_deepest(prompt, boundary - 1) if boundary > 1 else None


# ---- what is lost


@pytest.mark.parametrize("gone", [1, 2, 5, 9], ids=str)
def test_a_mark_outlives_its_checkpoint(gone: int) -> None:
    site = Site()
    prompt, _ = session(site, 600_000, seed=4)
    stored = site.all(prompt, MILLION)
    site.evict(prompt, *stored[:gone])
    found = site.find(prompt, MILLION - 1)
    assert found.boundaries[0] == stored[gone]
    assert not set(stored[:gone]) & set(found.known) and stored[gone] in found.known


def test_most_checkpoints_are_gone() -> None:
    """Of 300 the oldest is there, and one now and then: something is found, if not always the deepest."""
    site = Site()
    prompt, _ = session(site, 900_000, seed=5)
    stored = site.all(prompt, MILLION)
    site.evict(prompt, *(at for i, at in enumerate(stored) if i % 40 != 39))
    found = site.find(prompt, MILLION - 1)
    assert found.boundaries and site.leased <= EARLY + 4 * LATER


def test_marks_are_evicted_apart_from_checkpoints() -> None:
    site, prompt = Site(), Prompt()
    site.store(prompt, 100_000)
    site.store(prompt, 500_000)
    site.evict_marks(prompt, 100_000)
    assert site.find(prompt, 400_000).boundaries == ()
    assert site.find(prompt, 500_500).boundaries == (500_000, 100_000), "listed by the mark of another"
    site.evict_marks(prompt, 500_000)
    assert site.find(prompt, 500_500).boundaries == ()
    announce(site, prompt.key, [600_000], [100_000, 500_000], 1.0)
    site.put([Item(prompt.key(600_000), [FULL])], 1.0)
    assert set(site.find(prompt, 600_000).boundaries) == {600_000, 500_000, 100_000}
    site.store(prompt, 100_000)
    assert site.find(prompt, 400_000).boundaries == (100_000,)


@pytest.mark.parametrize("step", [64, 4096], ids=["fine", "coarse"])
def test_one_mark_of_two_is_enough_where_it_lists_the_checkpoint(step: int) -> None:
    site, prompt = Site(), Prompt()
    site.store(prompt, 100_000, known=())
    del site.values[Mark(step, 100_000 // step * step).key(prompt.key)]
    assert site.find(prompt, MILLION - 1).boundaries == ((100_000,) if step == 64 else ())


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * 256, b"\x01" * 7, b"\x00" * 256, b"\x10\x00\x00\x00" * 64],
    ids=["ones", "short", "empty", "16"],
)
def test_damaged_marks_are_no_hit(raw: bytes) -> None:
    site, prompt = Site(), Prompt()
    site.store(prompt, 100_000, 200_000)
    for key in site.values:
        if key.startswith("mark/"):
            site.values[key] = np.frombuffer(raw, np.uint8)
    assert site.find(prompt, MILLION - 1).boundaries[:1] == (200_000,)
    assert site.find(prompt.branch(64, 1), MILLION - 1).boundaries == ()


# ---- what it costs


def test_few_checkpoints_are_asked_about() -> None:
    site = Site()
    prompt, _ = session(site, 100_000, seed=6, turn=300)
    assert len(site.all(prompt, MILLION)) > 900
    for limit in (MILLION - 1, 60_000, 4097):
        site.check_deepest(prompt, limit)
        assert site.leased <= EARLY + LATER + 2


def test_a_publish_writes_two_marks_of_256_bytes() -> None:
    site, prompt = Site(), Prompt()
    assert announce(site, prompt.key, [905_000], range(1, 905_000), 1.0) == [Put.STORED] * 2
    assert {value.nbytes for value in site.values.values()} == {256}
    assert announce(site, prompt.key, [905_010], [905_000], 1.0) == [Put.HELD] * 2
    assert announce(site, prompt.key, [905_010, 905_100, 905_160], [], 1.0) == [
        Put.HELD,
        *[Put.HELD, *[Put.STORED] * 2],
    ]


def test_marks_list_the_deepest_and_some_of_all() -> None:
    (listed, *_) = marks_of([9_999], range(1, 20_000), LADDER).values()
    assert len(listed) == LISTED and listed[:32] == list(range(9_999, 9_967, -1))
    assert max(a - b for a, b in pairwise(listed)) < 400 and listed[-1] < 400
    assert decode(encode(listed)) == listed and decode(encode([7, 3])) == [7, 3]


@given(st.lists(st.integers()), st.integers(0, 20))
def test_spread_keeps_order_and_the_first(items: list[int], most: int) -> None:
    kept = spread(list(enumerate(items)), most)
    assert len(kept) == min(len(items), most) and kept == sorted(set(kept))
    assert kept[: (most + 1) // 2] == list(enumerate(items))[: (most + 1) // 2]


def test_beyond_a_million_tokens_it_takes_more_probes() -> None:
    site, prompt = Site(), Prompt()
    site.store(prompt, 100_000)
    found = site.find(prompt, 2 * MILLION)
    assert not found.boundaries and not found.complete
    site.probes = 700
    assert site.check_deepest(prompt, 2 * MILLION).boundaries == (100_000,)


# ---- use


def test_keys_of_a_real_chain() -> None:
    tokens = np.arange(3000)
    other = np.append(tokens[:1500], [7, 7, 7])
    start = KeyChain.start(Namespace(weights=b"w", tokenizer=b"t").digest())
    site = Site()
    for prompt, boundaries in ((tokens, [640, 1450, 2999]), (other, [1502])):
        keys = {at: start.extend(prompt[:at]).key.hex() for at in boundaries}
        site.put([Item(key, [FULL]) for key in keys.values()], 1.0)
        announce(site, lambda t, p=prompt: start.extend(p[:t]).key.hex(), boundaries, (), 1.0)
    third = np.append(tokens[:1501], [8] * 1000)
    found = find(site, lambda t: start.extend(third[:t]).key.hex(), len(third) - 1, 1.0)
    assert found.boundaries == (1450, 640) and found.complete


@pytest.mark.parametrize("store", STORES)
def test_a_checkpoint_is_found_and_fetched(request: pytest.FixtureRequest, store: str) -> None:
    """Through each store, also when the deepest is withdrawn and its marks stay."""
    prompt, other = Prompt(), Prompt().branch(70_000, 1)
    arrays = {at: {"state": random_array(at, "float32", (9, 5))} for at in (64_000, 69_999, 90_000)}
    with Watched(STORES[store](request)) as objects:
        for at, leaves in arrays.items():
            assert publish(objects, prompt.key(at), leaves, About("n", at), TIMEOUT) is Put.STORED
            known = find(objects, prompt.key, at, TIMEOUT).known
            assert announce(objects, prompt.key, [at], known, TIMEOUT) == [Put.STORED] * 2
        for deepest in (69_999, 64_000):
            objects.calls.clear()
            found = find(objects, other.key, 100_000, TIMEOUT)
            assert found.boundaries[0] == deepest and len(objects.calls) == 3
            checkpoint = fetch(objects, other.key(deepest), "n", None, TIMEOUT)
            assert checkpoint and checkpoint.about.boundary == deepest
            assert_same(checkpoint.arrays, arrays[deepest])
            assert withdraw(objects, other.key(deepest), TIMEOUT)
        assert find(objects, other.key, 100_000, TIMEOUT).boundaries == ()
        assert find(objects, prompt.key, 100_000, TIMEOUT).boundaries == (90_000,)


def test_a_store_that_is_full_loses_the_oldest() -> None:
    """Marks go with what was used longest ago, and what is found is there."""
    prompt, ends = Prompt(), range(20_000, 1_000_000, 20_000)
    with MemoryObjects(budget_nbytes=40_000) as objects:
        for at in ends:
            assert objects.put([item(prompt.key(at), bytes(4096))], TIMEOUT) == [Put.STORED]
            announce(objects, prompt.key, [at], find(objects, prompt.key, at, TIMEOUT).known, TIMEOUT)
        found = find(objects, prompt.key, MILLION - 1, TIMEOUT)
        assert found.boundaries[0] == ends[-1] and found.rounds == 3
        assert all(objects.contains([prompt.key(at) for at in found.boundaries], TIMEOUT))
        held = [at for at in ends if objects.contains([prompt.key(at)], TIMEOUT) == [True]]
        assert 1 < len(held) < 10
        found = find(objects, prompt.key, held[0], TIMEOUT)
        assert found.boundaries == (held[0],)


def test_no_prompt_no_call() -> None:
    assert Site().find(Prompt(), 0) == Found()


def test_a_late_store_is_a_miss() -> None:
    site, prompt = Site(), Prompt()
    site.store(prompt, 1000)
    site.delay = 0.02
    assert find(site, prompt.key, 2000, 0.01) == Found(complete=False, rounds=1, probes=1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"timeout": 0.0}, "must be positive"),
        ({"probes": 100}, "must be more than"),
        ({"ladder": Ladder(100, 64)}, "multiple of fine"),
        ({"ladder": Ladder(64, 0)}, "both positive"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_use_is_told(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find(Site(), Prompt().key, 1000, **dict[str, Any](timeout=1.0) | wrong)


def test_no_checkpoint_before_the_first_token() -> None:
    with pytest.raises(ValueError, match="boundary 0 must be positive"):
        announce(Site(), Prompt().key, [0, 64], (), 1.0)
