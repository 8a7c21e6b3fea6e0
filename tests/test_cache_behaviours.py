"""What a prefill publishes, whatever its calls are; what has to go and what a cap spares; copies whose source goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import rolling_model
from cache.holder import Holder
from cache.keys import KeyChain
from cache.payload import Payload
from cache.placement import place
from cache.plan import Limits
from cache.retention import Creation, Kind, policy
from cache.store import Store
from cache.tier import Tier
from cache.tiers import InMemory, demote, load, promote
from cache.view import Rows, Seen, View
from cache_site import NAMESPACE, ROW, STATE, Site, join, text

# calls of a prefill


def calls(start: int, num_tokens: int, budget: int) -> list[int]:
    """Where the calls of a prefill end that takes `budget` tokens a call and does not stop for checkpoints."""
    return [*range(start + budget, num_tokens, budget), num_tokens]


class Schedule(NamedTuple):
    """A prompt, and how a scheduler serves it that can cut checkpoints where its calls end, and only there.

    Attributes:
        grid: tokens between places where a checkpoint can be cut.
        start: where it resumes.
        num_tokens: of the prompt.
        ends: of that scheduler's calls, of at most 8,192 tokens each.
        hits: those of them from which it resumes this prompt again, or one that goes on from it.
    """

    grid: int
    start: int
    num_tokens: int
    ends: tuple[int, ...]
    hits: tuple[int, ...]


SCHEDULES = {
    "10,000 tokens, blocks of 512, hashes of 32": Schedule(32, 0, 10_000, (8192, 9728, 9984, 10_000), (9984,)),
    "resumed at 9,984 of 12,000": Schedule(32, 9984, 12_000, (10_240, 11_776, 12_000), (12_000,)),
    "a block of more than the budget": Schedule(
        11_392, 0, 30_000, (8192, 11_392, 19_584, 22_784, 30_000), (22_784,)
    ),
    "a prompt of one call": Schedule(64, 0, 8192, (8128, 8192), (8128, 8192)),
    "one token more than a call": Schedule(64, 0, 8193, (8192, 8193), (8192,)),
    "a short turn behind a long prompt": Schedule(64, 99_968, 100_100, (100_096, 100_100), (100_096,)),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=[name.replace(" ", "-") for name in SCHEDULES])
def test_calls_do_not_end_for_checkpoints_and_nothing_is_lost_by_it(schedule: Schedule) -> None:
    """A checkpoint is cut anywhere inside a call, so no call is shortened for one, and the deepest place that a
    scheduler with short calls could hit later is held all the same."""
    grid, start, num_tokens, ends, hits = schedule
    site, tokens = Site(grid=grid), text(num_tokens)
    if start:
        site.put(tokens[:start])
    resumed, made = site.serve(tokens)
    assert resumed == start
    ours = calls(start, num_tokens, 8192)
    assert len(ours) <= len(ends)
    boundaries = [boundary for boundary, _ in made]
    assert all(start < boundary <= num_tokens and boundary % grid == 0 for boundary in boundaries)
    assert set(hits) <= set(boundaries)
    longer = join(tokens, text(100, 1))
    for boundary in hits:
        assert site.plan(longer[: boundary + 1]).boundary == boundary
    assert site.plan(longer).boundary == num_tokens // grid * grid
    assert site.plan(tokens).boundary == (num_tokens - 1) // grid * grid


@pytest.mark.parametrize("budget", [512, 3200, 8192, 10**6])
@pytest.mark.parametrize(("num_tokens", "block"), [(10_000, 512), (30_000, 11_392), (12_000, 512), (129, 64)])
def test_dense_checkpoints_are_those_of_calls_that_end_on_each_block(
    num_tokens: int, block: int, budget: int
) -> None:
    """With an interval of a block, whatever a call takes: every multiple of it, and the prompt's end on the grid."""
    site, tokens = Site(grid=32), text(num_tokens)
    _, made = site.serve(tokens, creation=Creation(interval=block))
    blocks = set(range(block, num_tokens + 1, block))
    boundaries = {boundary for boundary, _ in made}
    assert boundaries == blocks | {num_tokens // 32 * 32, (num_tokens - 1) // 32 * 32}
    ends = calls(0, num_tokens, budget)
    within = [sum(start < each <= stop for each in boundaries) for start, stop in zip([0, *ends], ends)]
    assert sum(within) == len(boundaries), "each is cut inside exactly one call"
    for shared in (block, block + 1, num_tokens // 2, num_tokens - 1):
        hit = site.plan(join(tokens[:shared], text(50, 1))).boundary
        assert hit >= shared // block * block


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("grid", [1, 64, 512])
def test_nothing_is_placed_past_the_prompt(grid: int, num_tokens: int) -> None:
    """While a request generates, its state changes: marks of tokens to come, longer prompts that were seen, and what a
    remote store holds beyond this one name no checkpoint there."""
    site, tokens = Site(grid=grid), text(8192)
    site.serve(tokens, marks=[2000, 5000])
    site.store = site.store.evict(Tier.DEVICE, 10**9, site.now)
    far = View(8192, (Rows(0, 8192, Tier.REMOTE.bit),), (Seen(8192, Tier.REMOTE.bit),))
    marks = [num_tokens, num_tokens + 1, num_tokens + grid, 6000]
    for remote in (None, far):
        plan = site.plan(tokens[:num_tokens], remote=remote)
        assert all(each.boundary < num_tokens for each in plan.missing)
        made = place(plan, num_tokens, site.limits, Creation(interval=700), marks)
        assert [each for each in made if each.boundary > num_tokens] == []
        deepest = max((each.boundary for each in made), default=0)
        assert deepest == num_tokens // grid * grid


def test_what_is_generated_is_not_there_before_its_end_is_put() -> None:
    """1,000 tokens of prompt and 500 generated; who comes in between, with all that is known by then, resumes from the
    prompt, and from the end of the generation once that is published."""
    site, tokens = Site(), text(1600)
    site.serve(tokens[:1000])
    for generated in (1, 24, 63, 64, 499):
        assert site.plan(tokens[: 1000 + generated + 1]).boundary == 960
    site.put(tokens[:1500], kind=Kind.GENERATION_END)
    assert [site.plan(tokens[:count]).boundary for count in (1500, 1501, 1600)] == [960, 1500, 1500]


# a path's cap


def test_forks_leaves_and_pinned_survive_the_path_cap() -> None:
    """Two on a path: six turns of 1,024 tokens, a fork behind the second of them, the third pinned; another
    conversation, used before all of these, has not reached its cap."""
    empty = Store.empty(
        {Tier.DEVICE: 10**9}, policy("path_cap:2"), state_nbytes=STATE, row_nbytes=ROW, page=64, share=1.0
    )
    site, tokens = Site(), text(6 * 1024)
    site.store = empty
    before = site.put(text(1024, 9))
    turns = [site.put(tokens[: 1024 * turn]) for turn in (1, 2)]
    fork = site.put(join(tokens[:2048], text(1024, 1)))
    turns += [site.put(tokens[: 1024 * turn]) for turn in (3, 4, 5, 6)]
    site.store = site.store.pin(turns[2])
    gone: list[bytes] = []
    held = set(site.store.shelves[Tier.DEVICE].states)
    for _ in range(3):
        site.store = site.store.evict(Tier.DEVICE, 1, site.now)
        gone += held - set(gone) - set(site.store.shelves[Tier.DEVICE].states)
    assert gone == [turns[0], turns[3], turns[4]], (
        "the second is a fork, the third is pinned, the sixth is the leaf"
    )
    kept = {before, turns[1], turns[2], fork, turns[5]}
    assert set(site.store.shelves[Tier.DEVICE].states) == kept
    for prompt, boundary in [
        (tokens[:2048], 2048),
        (join(tokens[:2048], text(1024, 1)), 3072),
        (tokens, 6144),
    ]:
        assert site.plan(join(prompt, text(9, 3))).boundary == boundary
    site.store = site.store.evict(Tier.DEVICE, 1, site.now)
    assert before not in site.store.shelves[Tier.DEVICE].states, (
        "nothing is left to give up first: the oldest goes"
    )


# what has to go


SIZES = {"a": 64, "b": 64, "c": 8000, "d": 64}
"""Tokens of checkpoints, the one that was used longest ago first."""


@pytest.mark.parametrize(
    ("num_bytes", "gone"),
    [
        (1, "a"),
        (1064, "a"),
        (1065, "ab"),
        (2128, "ab"),
        (2129, "c"),
        (9000, "c"),
        (9001, "ac"),
        (11_129, "abcd"),
    ],
)
def test_what_is_given_up_is_what_is_needed(num_bytes: int, gone: str) -> None:
    """a and b, of 64 tokens, go before c, of 8,000: where c has to go too, the room that it leaves is enough for both,
    or for the one that is worth more."""
    site = Site(page=8)
    keys = {name: site.put(text(tokens, at)) for at, (name, tokens) in enumerate(SIZES.items())}
    store = site.store.evict(Tier.DEVICE, num_bytes, site.now)
    held = store.shelves[Tier.DEVICE].states
    assert "".join(name for name, key in keys.items() if key not in held) == gone
    assert store.counts.evicted == len(gone)
    size = sum(STATE + tokens * ROW for name, tokens in SIZES.items() if name not in gone)
    assert store.shelves[Tier.DEVICE].nbytes == size


def test_what_is_spared_leaves_as_much_room() -> None:
    """The first turn is given up, then the second, of whose latents it has a half: it cannot stay for nothing."""
    site, tokens = Site(), text(4096)
    site.put(tokens[:2048])
    site.put(tokens)
    store = site.store.evict(Tier.DEVICE, STATE + 4096 - 2048 + 1, site.now)
    assert store.shelves[Tier.DEVICE].nbytes == 0


# copies whose source goes


PAGE = 64


class Pool:
    """Memory in slots of a page each, which are given out again as soon as they are free: a stale reader would see
    somebody else's rows."""

    def __init__(self, slots: int) -> None:
        self.memory: list[Any] = [None] * slots
        self.free = list(range(slots))

    def write(self, contents: Any) -> InSlot:
        slot = self.free.pop(0)
        self.memory[slot] = contents
        return InSlot(self, slot)


class InSlot:
    """A payload that is in a slot until no version of the store has it."""

    nbytes = PAGE

    def __init__(self, pool: Pool, slot: int) -> None:
        self.pool, self.slot = pool, slot
        weakref.finalize(self, pool.free.insert, 0, slot)

    def read(self) -> Any:
        return self.pool.memory[self.slot]


class Slow:
    """A slower tier, during each of whose writes something happens."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile

    def write(self, name: str, payload: Payload) -> Payload:
        self.meanwhile()
        assert isinstance(payload, InSlot)
        return payload.read()

    def read(self, name: str, kept: Payload | None) -> Payload:
        assert kept is not None
        return kept


@pytest.mark.parametrize("tokens", [4096, 64, 1000], ids=lambda tokens: f"{tokens}-tokens")
@pytest.mark.parametrize("move", [promote, demote], ids=["write-through", "demote"])
def test_a_slot_is_not_given_out_again_while_its_copy_is_under_way(move: Callable, tokens: int) -> None:
    """A publishes; while its pages are written to the host, A is given up and B, of as many tokens, takes every slot
    that is free. What is published in the host is A's, or is not there."""
    pool = Pool(3 * (tokens // PAGE + 1))
    a, b = text(tokens), text(tokens, 1)
    runs = [rolling_model.run(rolling_model.start(NAMESPACE), each) for each in (a, b)]

    def put(store: Store, at: int) -> Store:
        state, pages = runs[at].checkpoint(tokens, PAGE)
        held = [pool.write(page) for page in pages]
        return store.put(NAMESPACE, (a, b)[at], pool.write(state), held, kind=Kind.PROMPT_END, now=float(at))

    def meanwhile() -> None:
        """Once, then no more."""
        storages[Tier.HOST] = Slow(lambda: None)
        holder.update(lambda store: store.evict(Tier.DEVICE, 10**9, 1.0))
        holder.update(lambda store: put(store, 1))

    sizes = {"state_nbytes": PAGE, "row_nbytes": ROW, "page": PAGE}
    holder = Holder(Store.empty({Tier.DEVICE: 10**9, Tier.HOST: 10**9}, policy("lru"), share=1.0, **sizes))
    holder.update(lambda store: put(store, 0))
    key = KeyChain.start(NAMESPACE, PAGE).extend(a).key
    storages: dict[Tier, Any] = {Tier.DEVICE: InMemory(), Tier.HOST: Slow(meanwhile)}
    arguments = (Tier.DEVICE,) if move is demote else (Tier.HOST,)
    assert move(holder, key, *arguments, storages, 1.0)
    assert key not in holder.store.shelves[Tier.DEVICE].states
    prompt = join(a, text(1, 5))
    plan = holder.store.plan(holder.store.match(NAMESPACE, prompt), tokens + 1, Limits(grid=1))
    assert (plan.boundary, plan.state) == (tokens, Tier.HOST)
    state, pages = load(holder.store, plan, KeyChain.start(NAMESPACE, PAGE).extend(a), storages)
    resumed = rolling_model.resumed(tokens, state, pages)
    assert rolling_model.run(resumed, [7]).answer == rolling_model.run(runs[0], [7]).answer
    assert len(pool.free) == len(pool.memory) - (tokens // PAGE + 1), "A's slots are free again, B's are not"
