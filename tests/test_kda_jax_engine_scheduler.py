"""The scheduler step by step: the life of one request, who goes first, what is refused, and a cancel at every point."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from engine_device import Device, HostBytes, cold, truth

from cache.holder import Holder
from cache.keys import KeyChain
from cache.plan import ResumePlan
from cache.retention.protocol import Creation, Kind
from cache.store import Store
from cache.tier import Tier
from cache.view import Rows, Seen, View
from kda_jax.engine.pages import Pages, Slots
from kda_jax.engine.request import Outcome, Overloaded, Refused, Request, Stage
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.sizes import Sizes
from kda_jax.engine.work import Report, Work
from oldest_first import OldestFirst

NAMESPACE = b"n" * 32
ROWS, STATE_PAGES, PAGE_NBYTES = 4, 2, 64


def request(id: int, tokens: list[int], most: int = 4, **more: Any) -> Request:
    return Request(id=id, namespace=NAMESPACE, tokens=np.array(tokens, np.int32), max_new_tokens=most, **more)  # type: ignore[arg-type]


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 3, count).tolist()


def answer(tokens: list[int], most: int = 4) -> list[int]:
    return list(cold(NAMESPACE, tuple(tokens), most))


class Engine:
    """A scheduler, and a device whose model is a rolling hash."""

    def __init__(
        self,
        *,
        num_pages: int = 41,
        num_slots: int = 4,
        queued: int = 1000,
        budget: int = 16,
        drafts: int = 0,
    ) -> None:
        self.pages, self.slots = Pages(num_pages, PAGE_NBYTES), Slots(num_slots)
        budgets = {Tier.DEVICE: self.pages.capacity * PAGE_NBYTES, Tier.HOST: 100 * PAGE_NBYTES}
        store = Store.empty(
            budgets,
            OldestFirst(),
            state_nbytes=STATE_PAGES * PAGE_NBYTES,
            row_nbytes=PAGE_NBYTES // ROWS,
            page=ROWS,
            share=1.0,
        )
        self.holder = Holder(store)
        sizes = Sizes(rows=ROWS, state_pages=STATE_PAGES, budget=budget, grid=4, queued=queued, drafts=drafts)
        self.scheduler = Scheduler(self.holder, self.pages, self.slots, sizes, Creation())
        self.device = Device(self.scheduler, num_pages, num_slots)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Outcome] = {}

    def begin(self, now: float = 0.0) -> Work:
        work = self.scheduler.step(now)
        self.hear(self.scheduler.report())
        return work

    def finish(self, work: Work, now: float = 0.0, failed: frozenset[int] = frozenset()) -> None:
        self.scheduler.done(work, self.device.execute(work, failed), now)
        self.hear(self.scheduler.report())

    def hear(self, report: Report) -> None:
        for id, token in report.tokens:
            self.tokens.setdefault(id, []).append(token)
        for id, outcome in report.ended:
            assert id not in self.ended
            self.ended[id] = outcome

    def run(self, now: float = 0.0) -> list[Work]:
        """Steps until there is nothing to do. Loads are over at once."""
        works = []
        while not works or not works[-1].empty:
            works.append(self.begin(now))
            self.finish(works[-1], now)
            for load in works[-1].loads:
                self.device.load(load, len(load.pages), whole=True)
                self.scheduler.loaded(load.id, load.attempt, (), now)
        return works

    def to_host(self) -> None:
        """All checkpoints move from the pool to the host."""
        store = self.holder.store
        shelf = store.shelves[Tier.DEVICE]
        for key, kept in sorted(shelf.states.items()):
            pages = {
                name: HostBytes(PAGE_NBYTES, tuple(self.device.pages[shelf.pages[name].pages[0]]))  # type: ignore[union-attr]
                for name in self.holder.store.prompts.lacks(key, Tier.HOST)
            }
            state = HostBytes(STATE_PAGES * PAGE_NBYTES, self.device.content(kept))
            self.holder.update(lambda store: store.copied(key, Tier.HOST, state, pages, 0.0))  # noqa: B023
        del store, shelf, kept
        self.holder.update(lambda store: store.evict(Tier.DEVICE, 10**6, 0.0))

    def check_rest(self) -> None:
        """Nothing is held but by the cache, and that gives all back."""
        assert not self.scheduler.live and not self.holder.store.pinned
        self.holder.update(lambda store: store.evict(Tier.DEVICE, 10**6, 0.0))
        assert self.pages.free == self.pages.capacity
        assert self.slots.free == self.slots.num_slots - 1


def test_a_request_from_first_to_last() -> None:
    engine, tokens = Engine(), prompt(21)
    engine.scheduler.submit(request(1, tokens))
    works = engine.run()
    assert [(chunk.start, len(chunk.tokens)) for work in works for chunk in work.chunks] == [(0, 16), (16, 5)]
    assert [len(work.zeros) for work in works[:2]] == [1, 0]
    assert engine.tokens[1] == answer(tokens) and engine.ended == {1: Outcome.FINISHED}
    ends = [snapshot.boundary for work in works for snapshot in work.snapshots]
    assert ends == [len(tokens) + len(answer(tokens)) - 1]
    engine.check_rest()


def test_the_next_turn_resumes_at_the_last_ones_end() -> None:
    engine, tokens = Engine(), prompt(21)
    engine.scheduler.submit(request(1, tokens))
    engine.run()
    longer = [*tokens, *engine.tokens[1], 1, 2]
    engine.scheduler.submit(request(2, longer))
    works = engine.run()
    end = len(tokens) + len(engine.tokens[1]) - 1
    assert [restore.boundary for work in works for restore in work.restores] == [end]
    assert works[0].chunks[0].start == end and not works[0].zeros
    assert engine.tokens[2] == answer(longer)
    engine.check_rest()


def test_a_checkpoint_that_moved_to_the_host_is_loaded_while_others_compute() -> None:
    engine, tokens = Engine(), prompt(21)
    engine.scheduler.submit(request(1, tokens))
    engine.run()
    engine.to_host()
    longer, other = [*tokens, *engine.tokens[1], 1, 2], prompt(8, seed=1)
    engine.scheduler.submit(request(2, longer))
    engine.scheduler.submit(request(3, other))
    work = engine.begin()
    (load,) = work.loads
    assert load.boundary == len(tokens) + len(engine.tokens[1]) - 1 and load.tier is Tier.HOST
    assert [chunk.id for chunk in work.chunks] == [3]
    engine.finish(work)
    engine.device.load(load, len(load.pages), whole=True)
    engine.scheduler.loaded(load.id, load.attempt, (), 0.0)
    engine.run()
    assert engine.tokens[2] == answer(longer) and engine.tokens[3] == answer(other)
    engine.check_rest()


class Counted:
    """A pace that would rather compute, and counts who started."""

    def __init__(self) -> None:
        self.asked, self.started_by = 0, list[tuple[int, list[int]]]()

    def seconds(self, plan: ResumePlan, num_tokens: int) -> float:
        self.asked += 1
        return float(plan.boundary)

    def started(self, plan: ResumePlan, plans: Sequence[ResumePlan]) -> None:
        self.started_by.append((plan.boundary, [each.boundary for each in plans]))


def test_a_request_that_waits_is_planned_often_and_counts_once() -> None:
    engine, tokens = Engine(num_pages=15), prompt(21)
    engine.scheduler.submit(request(1, tokens))
    engine.run()
    engine.to_host()
    engine.scheduler._pace = pace = Counted()
    engine.scheduler.submit(request(2, prompt(30, seed=1), 8))
    engine.scheduler.submit(request(3, [*tokens, *engine.tokens[1], 1]))
    works = engine.run()
    assert pace.asked > 8 and not any(work.loads for work in works)
    end = len(tokens) + len(engine.tokens[1]) - 1
    assert pace.started_by == [(0, [0]), (0, [end, 0])]
    engine.check_rest()


def remote_objects(tokens: list[int], boundary: int) -> tuple[dict[bytes, object], View]:
    """A prompt's latents as far as a boundary, and the state there, as a remote store has them; and what it says."""
    state, rows = truth(NAMESPACE, np.array(tokens[:boundary], "<i4").tobytes())
    chain, whole = KeyChain.start(NAMESPACE, ROWS).extend(tokens[:boundary]), boundary // ROWS * ROWS
    objects = {b"page" + name: rows[n * ROWS : (n + 1) * ROWS] for n, name in enumerate(chain.added)}
    view = View(0, (Rows(0, whole, Tier.REMOTE.bit),), (Seen(boundary, Tier.REMOTE.bit, chain.key),))
    return {**objects, b"state" + chain.key: (state, rows[whole:])}, view


def test_a_checkpoint_of_a_remote_store_is_resumed() -> None:
    engine, tokens = Engine(), prompt(21)
    objects, view = remote_objects(tokens, 18)
    engine.device.remote = objects
    engine.scheduler.submit(request(1, tokens, remote=view))
    works = engine.run()
    assert [(load.boundary, load.tier, len(load.pages)) for work in works for load in work.loads] == [
        (18, Tier.REMOTE, 4)
    ]
    assert [chunk.start for work in works for chunk in work.chunks] == [18]
    assert engine.tokens[1] == answer(tokens)
    engine.check_rest()


def test_a_boundary_whose_state_a_remote_store_lacks_is_filled_once() -> None:
    engine, tokens = Engine(), prompt(21)
    view = remote_objects(tokens, 12)[1]._replace(boundaries=())
    engine.scheduler.submit(request(1, tokens, remote=view))
    made = [snapshot for work in engine.run() for chunk in work.chunks for snapshot in chunk.snapshots]
    assert (12, Kind.MISSING) in [(snapshot.boundary, snapshot.kind) for snapshot in made]
    other = [*tokens[:12], 1, *prompt(5, seed=9)]
    engine.scheduler.submit(request(2, other, remote=view))
    works = engine.run()
    assert [restore.boundary for work in works for restore in work.restores] == [12]
    assert not [s for work in works for chunk in work.chunks for s in chunk.snapshots if s.boundary == 12]
    assert engine.tokens == {1: answer(tokens), 2: answer(other)}
    engine.check_rest()


@pytest.mark.parametrize("part", ["state", "page"])
def test_a_load_that_fails_is_computed(part: str) -> None:
    engine, tokens = Engine(), prompt(21)
    engine.scheduler.submit(request(1, tokens))
    engine.run()
    engine.to_host()
    engine.scheduler.submit(request(2, tokens))
    work = engine.begin()
    (load,) = work.loads
    engine.finish(work)
    lost = (load.tier, None if part == "state" else load.pages[0].name)
    engine.scheduler.loaded(load.id, load.attempt, [lost], 0.0)
    works = engine.run()
    assert works[0].chunks[0].start == 0 and not any(work.loads for work in works)
    assert engine.tokens[2] == answer(tokens) and engine.holder.store.counts.lost
    engine.check_rest()


def test_who_has_priority_goes_first_then_who_came_first() -> None:
    engine, starts = Engine(num_slots=2), []
    for id, priority in enumerate([0, 0, 2, 1]):
        engine.scheduler.submit(request(id, prompt(6, seed=id), priority=priority))
    for work in engine.run():
        starts += [chunk.id for chunk in work.chunks]
    assert list(dict.fromkeys(starts)) == [2, 3, 0, 1]
    engine.check_rest()


def test_a_priority_takes_the_slot_of_who_is_last_and_he_goes_on_where_he_was() -> None:
    engine, first, second = Engine(num_slots=2), prompt(12), prompt(6, seed=7)
    engine.scheduler.submit(request(1, first, 8))
    engine.finish(engine.begin())
    engine.scheduler.submit(request(2, second, priority=1))
    work = engine.begin()
    assert [(snapshot.id, snapshot.boundary) for snapshot in work.snapshots] == [(1, 12)]
    assert not work.rows and engine.scheduler.live[1].stage is Stage.SAVING
    engine.finish(work)
    works = engine.run()
    assert [(restore.id, restore.boundary) for work in works for restore in work.restores] == [(1, 12)]
    assert engine.tokens == {1: answer(first, 8), 2: answer(second)}
    engine.check_rest()


def test_who_is_preempted_is_before_those_who_came_after_him() -> None:
    engine = Engine(num_pages=5, num_slots=5)
    engine.scheduler.submit(request(1, prompt(13), 3, priority=1))
    engine.finish(engine.begin())  # all four pages are his
    engine.scheduler.submit(request(2, [1], 1, priority=1))
    engine.scheduler.submit(request(3, [2], 1, priority=2))
    work = engine.begin()
    assert [chunk.id for chunk in work.chunks] == [3]
    assert engine.scheduler.live[1].stage is engine.scheduler.live[2].stage is Stage.WAITING
    engine.finish(work)
    engine.run()
    assert engine.tokens[1] == answer(prompt(13), 3) and len(engine.ended) == 3
    engine.check_rest()


def test_two_that_do_not_fit_together_both_end() -> None:
    tokens = [prompt(8, seed=1), prompt(8, seed=2)]
    engine = Engine(num_pages=7)  # 20 rows are 5 pages, and a state takes 2
    for id in range(2):
        engine.scheduler.submit(request(id, tokens[id], 12))
    engine.run()
    assert engine.tokens == {id: answer(tokens[id], 12) for id in range(2)}
    engine.check_rest()


def test_a_slot_that_is_not_cleared_is_not_used() -> None:
    """Its request has no other part in the step: the one before takes the budget."""
    engine = Engine(budget=16)
    engine.scheduler.submit(request(1, prompt(40)))
    engine.scheduler.submit(request(2, prompt(9, seed=1)))
    work = engine.begin()
    assert [zero.id for zero in work.zeros] == [1, 2] and [chunk.id for chunk in work.chunks] == [1]
    engine.finish(work, failed=frozenset({2}))
    assert engine.ended == {2: Outcome.FAILED}
    engine.run()
    assert engine.tokens == {1: answer(prompt(40))}
    engine.check_rest()


def test_a_failed_step_fails_its_requests_and_publishes_nothing() -> None:
    engine = Engine()
    for id in range(2):
        engine.scheduler.submit(request(id, prompt(8, seed=id)))
    engine.finish(engine.begin(), failed=frozenset({0}))
    engine.run()
    assert engine.ended == {0: Outcome.FAILED, 1: Outcome.FINISHED}
    seen = engine.holder.store.match(NAMESPACE, prompt(8, seed=0))
    assert all(item.boundary < 8 or not item.tiers for item in seen.boundaries)
    engine.check_rest()


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs() -> None:
    engine = Engine(num_slots=2)
    for id in range(2):
        engine.scheduler.submit(request(id, prompt(8, seed=id), 10, deadline=5.0))
    engine.finish(engine.begin(4.9), 4.9)
    work = engine.begin(5.0)
    assert work.empty and engine.ended == {0: Outcome.EXPIRED, 1: Outcome.EXPIRED}
    engine.finish(work, 5.0)
    engine.check_rest()


@pytest.mark.parametrize("flight", [False, True], ids=["between steps", "in a step"])
def test_a_cancel_at_every_step_gives_everything_back(flight: bool) -> None:
    tokens, steps = prompt(21), 0
    while True:
        engine = Engine()
        engine.scheduler.submit(request(1, tokens))
        for _ in range(steps):
            engine.finish(engine.begin())
        if flight:
            work = engine.begin()
        cancelled = engine.scheduler.cancel(1)
        engine.hear(engine.scheduler.report())
        assert engine.ended == {1: Outcome.CANCELLED if cancelled else Outcome.FINISHED}
        if flight:
            assert not engine.scheduler.live or engine.scheduler.live[1].slot or work.empty
            engine.finish(work)
        engine.run()
        engine.check_rest()
        assert engine.tokens.get(1, []) == answer(tokens)[: len(engine.tokens.get(1, []))]
        if not cancelled:
            break
        steps += 1
    assert steps >= 4


def test_a_cancelled_load_keeps_its_pages_until_it_is_over() -> None:
    engine, tokens = Engine(), prompt(21)
    engine.scheduler.submit(request(1, tokens))
    engine.run()
    engine.to_host()
    engine.scheduler.submit(request(2, tokens))
    work = engine.begin()
    (load,) = work.loads
    engine.finish(work)
    assert engine.scheduler.cancel(2) and not engine.scheduler.cancel(2)
    assert engine.pages.free < engine.pages.capacity
    engine.device.load(load, len(load.pages), whole=True)
    engine.scheduler.loaded(load.id, load.attempt, (), 0.0)
    engine.check_rest()


def test_what_can_never_fit_is_refused_and_what_is_too_much_now_is_turned_away() -> None:
    engine = Engine(num_pages=7, queued=30)
    with pytest.raises(Refused, match="24 tokens and 4 new ones need 7 pages, the pool has 6"):
        engine.scheduler.submit(request(1, prompt(24)))
    engine.scheduler.submit(request(2, prompt(20)))
    with pytest.raises(Overloaded, match="20 tokens wait, the most is 30"):
        engine.scheduler.submit(request(3, prompt(11)))
    with pytest.raises(ValueError, match="request 2 is there already"):
        engine.scheduler.submit(request(2, prompt(1)))
    engine.run()
    assert engine.ended == {2: Outcome.FINISHED}
    engine.check_rest()


def test_a_checkpoint_without_room_is_left_out() -> None:
    tokens = prompt(20)
    engine = Engine(num_pages=7)  # all six are the request's
    engine.scheduler.submit(request(1, tokens))
    works = engine.run()
    assert not any(work.snapshots or any(chunk.snapshots for chunk in work.chunks) for work in works)
    assert engine.tokens[1] == answer(tokens)
    engine.check_rest()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Pages(1, 8), "beside page 0"),
        (lambda: Slots(1), "beside slot 0"),
        (lambda: Pages(3, 8).give_back([1]), "more often than taken"),
        (lambda: Slots(3).give_back(1), "not taken"),
        (lambda: request(1, []), "at least"),
        (lambda: Sizes(rows=4, state_pages=1, budget=8), "at least a step of the grid"),
        (lambda: Sizes(rows=4, state_pages=1, drafts=-1), "sizes are positive"),
        (lambda: Engine(budget=5), "serves 3 rows beside 4"),
    ],
    ids=[
        "no page",
        "no slot",
        "page given twice",
        "slot given twice",
        "no token",
        "budget",
        "drafts",
        "rows",
    ],
)
def test_bad_values_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()  # type: ignore[operator]


def test_pages_come_back_when_the_last_holder_lets_go() -> None:
    pages = Pages(5, 8)
    taken = pages.take(3)
    assert taken is not None and 0 not in taken and pages.take(2) is None
    payload = pages.payload(taken)
    assert payload.nbytes == 24 and payload == pages.payload(taken)
    pages.give_back(taken)
    assert pages.free == 1
    del payload
    gc.collect()
    assert pages.free == 4


def test_kinds_that_are_not_wanted_are_not_made() -> None:
    engine = Engine()
    engine.scheduler.creation = Creation(kinds=frozenset(Kind) - {Kind.GENERATION_END})
    engine.scheduler.submit(request(1, prompt(21)))
    assert not any(work.snapshots for work in engine.run())
    engine.check_rest()


class Fixed:
    """Drafts that are the same tokens each time, or those of an answer from where it stands."""

    def __init__(self, tokens: list[int], behind: int | None = None) -> None:
        self.tokens, self.behind = tokens, behind
        self.asked: list[int] = []
        self.count = 0

    def read(self, tokens: np.ndarray, most: int) -> None:
        self.count = min(len(tokens), self.count + most)

    def propose(self, tokens: np.ndarray, most: int) -> tuple[int, ...]:
        self.asked.append(most)
        return tuple(self.tokens[0 if self.behind is None else len(tokens) - self.behind :][:most])


def long_answer(least: int, most: int) -> tuple[list[int], list[int]]:
    """A prompt whose answer has `most` tokens and does not stop before, and the answer."""
    for seed in range(1000):
        tokens = prompt(5, seed)
        if len(made := answer(tokens, most)) >= least:
            return tokens, made
    raise AssertionError("no prompt has so long an answer")


def test_drafts_that_are_right_make_a_few_steps_of_many() -> None:
    engine, (tokens, made) = Engine(drafts=3), long_answer(10, 10)
    drafter = Fixed(made, len(tokens))
    engine.scheduler.submit(request(1, tokens, 10), drafter)
    works = engine.run()
    rows = [row for work in works for row in work.rows]
    # the first token comes of the prefill, each row brings its drafts and one more, the last two no draft too many
    assert [(row.position, len(row.drafts)) for row in rows] == [(5, 3), (9, 3), (13, 0)]
    assert drafter.asked == [3, 3]
    assert engine.tokens[1] == made and engine.ended == {1: Outcome.FINISHED}
    (end,) = [snapshot for work in works for snapshot in work.snapshots]
    assert end.boundary == 5 + 10 - 1
    engine.scheduler.submit(request(2, [*tokens, *made, 1], 1))
    assert [restore.boundary for work in engine.run() for restore in work.restores] == [end.boundary]
    assert engine.tokens[2] == answer([*tokens, *made, 1], 1)
    engine.check_rest()


def test_drafters_read_a_bounded_part_of_their_texts_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt as it is computed and when it is restored; who lacks little does not wait for who lacks much."""
    monkeypatch.setattr("kda_jax.engine.drafting.READ", 5)
    engine, (tokens, made) = Engine(drafts=3, budget=64), long_answer(10, 10)
    long = next(each for seed in range(1000) if len(answer(each := prompt(41, seed), 20)) == 20)
    engine.scheduler.submit(request(0, long, 1))
    engine.run()
    far, near = Fixed([0]), Fixed(made, len(tokens))
    engine.scheduler.submit(request(1, long, 20), far)
    engine.scheduler.submit(request(2, tokens, 10), near)
    read, drafted = [0], dict[int, list[int]]({1: [], 2: []})
    while not (work := engine.begin()).empty:
        read.append(far.count + near.count)
        for row in work.rows:
            drafted[row.id].append(len(row.drafts))
            assert not row.drafts or {1: far, 2: near}[row.id].count == row.position + 1
        engine.finish(work)
    assert max(after - before for before, after in pairwise(read)) == 5
    assert drafted[2] == [3, 3, 0] and not any(drafted[1][:3]) and any(drafted[1])
    assert engine.tokens[2] == made and engine.tokens[1] == answer(long, 20)
    engine.check_rest()


def test_drafts_that_are_wrong_cost_a_step_nothing_but_their_tokens() -> None:
    engine, (tokens, made) = Engine(drafts=3), long_answer(6, 6)
    wrong = [(token + 1) % 3 for token in made[1:]]
    engine.scheduler.submit(request(1, tokens, 6), Fixed(wrong, len(tokens) + 1))
    works = engine.run()
    assert [row.position for work in works for row in work.rows] == [5, 6, 7, 8, 9]
    assert engine.tokens[1] == made
    engine.check_rest()


def test_an_end_among_drafts_is_the_end() -> None:
    tokens = next(prompt(5, seed) for seed in range(200) if 3 <= len(answer(prompt(5, seed), 12)) < 8)
    made = answer(tokens, 12)
    engine = Engine(drafts=8)
    engine.scheduler.submit(request(1, tokens, 12), Fixed([*made, *[0] * 12], len(tokens)))
    works = engine.run()
    assert len([row for work in works for row in work.rows]) == 1
    assert engine.tokens[1] == made and engine.ended == {1: Outcome.FINISHED}
    assert [s.boundary for work in works for s in work.snapshots] == [5 + len(made) - 1]
    engine.check_rest()


def test_drafts_take_what_is_left_of_a_step() -> None:
    engine, (tokens, made) = Engine(drafts=8, budget=12), long_answer(10, 10)
    for id in range(2):
        engine.scheduler.submit(request(id, tokens, 10), Fixed(made, len(tokens)))
    engine.finish(engine.begin())
    engine.scheduler.submit(request(2, prompt(30, seed=4)))
    work = engine.begin()
    # two rows, a step of the grid for the prefill, and of the rest who is first takes what he can
    assert [len(row.drafts) for row in work.rows] == [6, 0]
    assert [len(chunk.tokens) for chunk in work.chunks] == [4]
    engine.finish(work)
    engine.run()
    assert engine.tokens[0] == engine.tokens[1] == made
    engine.check_rest()


def test_drafts_take_free_pages_and_no_checkpoint() -> None:
    engine, (tokens, made) = Engine(drafts=8, num_pages=10), long_answer(12, 12)
    engine.scheduler.creation = Creation(kinds=frozenset({Kind.PROMPT_END}))
    engine.scheduler.submit(request(1, prompt(8, seed=3), 1))
    engine.run()
    assert engine.pages.free == 3  # two pages of latents and two states are the cache's
    engine.scheduler.creation = Creation(kinds=frozenset())
    engine.scheduler.submit(request(2, tokens, 12), Fixed(made, len(tokens)))
    engine.finish(engine.begin())
    work = engine.begin()
    assert [(row.position, len(row.drafts), len(row.table)) for row in work.rows] == [(5, 6, 3)]
    assert engine.pages.free == 0 and len(engine.holder.store.shelves[Tier.DEVICE].states) == 2
    engine.finish(work)
    work = engine.begin()  # a token, unlike a guess, is worth a checkpoint
    assert [(row.position, len(row.drafts)) for row in work.rows] == [(12, 3)]
    engine.finish(work)
    engine.run()
    assert engine.tokens[2] == made
    engine.check_rest()


def test_who_decodes_waits_for_no_more_of_a_prefill_than_is_said() -> None:
    """Alone a prompt is read by the budget; beside a row by what `beside` allows for it."""
    engine, asked = Engine(budget=16), []

    def beside(rows: int, grid: int, budget: int) -> int:
        asked.append((rows, grid, budget))
        return 8

    def chunk() -> int:
        work = engine.scheduler.step(0.0, beside)
        engine.finish(work)
        return sum(len(each.tokens) for each in work.chunks)

    engine.scheduler.submit(request(0, prompt(3), 20))
    engine.scheduler.submit(request(1, prompt(40, seed=1), 1))
    assert [chunk() for _ in range(4)] == [3 + 12, 8, 8, 8]
    assert asked == [(1, 4, 16)] * 3
