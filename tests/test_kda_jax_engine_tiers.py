"""Checkpoints in host memory, on disk and in a store that other engines share: tokens and bits stay the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_site import CONFIG, NAMESPACE, assert_cold, cold, conserved, engine, programs
from engine_tiers import ENDS, eager, forget_device, prompt_of, written

from cache import KeyChain, Tier
from cache.plan import ResumePlan, Source
from cache.retention import Creation, Kind
from cache.tiers import page_name
from kda_jax.engine import Engine, Shared, cut
from kda_jax.engine.portable import Portable
from kda_jax.engine.programs import Lane
from kda_jax.engine.rates import Line, Rates
from kda_jax.forward import prefill
from measure import assert_close
from transfer import DiskObjects, MemoryObjects, Read


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no store that fails."""
    monkeypatch.setattr("kda_jax.engine.slower.MOST", 20.0)


@pytest.fixture
def objects() -> Iterator[MemoryObjects]:
    with MemoryObjects() as opened:
        yield opened


@pytest.mark.slow
def test_what_leaves_the_pool_has_the_form_that_cut_gives() -> None:
    """State and pages of 130 tokens, and to the bit back into another slot."""
    made, prompt = programs(), prompt_of(0, 130)
    portable, memory = Portable(made.layout), made.empty()
    memory, _ = made.prefill(made.zero(memory, 2), prompt[:128], Lane(2, (5, 9, 3), 0))
    memory, _ = made.prefill(memory, prompt[128:], Lane(2, (5, 9, 3), 128))
    saved = (11, 12, 13)[: made.layout.snapshot_pages(130)]
    memory = made.snapshot(memory, Lane(2, (5, 9, 3), 130), saved)

    def pages(numbers: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.asarray(piece) for piece in made.read_pages(memory, numbers)])[
            : len(numbers)
        ]

    state, rows = portable.state(130, pages(saved)), [portable.page(page) for page in pages((5, 9))]
    parts = (made.graphdef, made.params)
    _, half = prefill(parts, [prompt[:128]])
    want = cut(prefill(parts, [prompt[128:]], half)[1], made.layout.page_rows)
    for mine, theirs in ((state, want.state), *zip(rows, want.pages, strict=True)):
        assert mine.keys() == theirs.keys()
        for name, leaf in theirs.items():
            assert (mine[name].dtype, mine[name].shape) == (leaf.dtype, leaf.shape)
            assert_close(name, np.float64(leaf), np.float64(mine[name]), 2e-5)

    slot = portable.slot(130, state)
    assert slot.tail is not None
    piece = np.stack([portable.rows(rows[0]), portable.rows(rows[1]), slot.tail, *[slot.tail] * 5])
    memory = made.write_pages(memory, (20, 21, 22), [piece])
    memory = made.write_state(memory, 4, slot.recurrent, slot.conv)
    for pool in (*memory.recurrent, *memory.conv):
        np.testing.assert_array_equal(pool[2], pool[4])
    memory, one = made.decode(memory, [7], [Lane(2, (5, 9, 3), 130)])
    memory, other = made.decode(memory, [7], [Lane(4, (20, 21, 22), 130)])
    np.testing.assert_array_equal(one.logits, other.logits)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("layers.0.conv"),
        lambda state: state.update({"layers.0.position": np.full((1,), 65, np.int32)}),
        lambda state: state.update({"layers.0.conv": state["layers.0.conv"].astype(np.float16)}),
        lambda state: state.update({"layers.1.latent": state["layers.1.latent"][:, :0]}),
    ],
    ids=["a leaf less", "another boundary", "another dtype", "rows less"],
)
def test_a_state_that_does_not_belong_there_is_refused(spoil: Any) -> None:
    made = programs()
    portable = Portable(made.layout)
    state = portable.state(70, np.zeros((made.layout.state_pages + 1, 1, 64, CONFIG.latent_size), np.float32))
    portable.slot(70, state)
    spoil(state)
    with pytest.raises(ValueError, match=r"layers|state"):
        portable.slot(70, state)


def shown(made: Engine) -> list[tuple[str, ...]]:
    """The tiers of each checkpoint in the tree, which its latents are in as well."""
    nodes = [node for node in made.tree() if node.boundary]
    assert all(node.rows == node.states for node in nodes)
    return [node.states for node in nodes]


@pytest.mark.parametrize("tier", ["host", "disk", "remote"])
def test_what_the_device_forgot_comes_back_from_a_slower_tier(
    tier: str, objects: MemoryObjects, tmp_path: Path
) -> None:
    prompt = prompt_of(1)
    with DiskObjects(tmp_path / "objects", 1 << 26) as disk:
        options = {"host": {"host_nbytes": 2**20}, "disk": {"disk": disk}, "remote": {"remote": objects}}[
            tier
        ]
        with eager(**options) as made:
            first = made.generate([prompt], max_new_tokens=6)[0]
            written(made)
            assert made.statistics().written == {tier: 2} and not made.statistics().unwritten
            assert shown(made) == [("device", tier)] * 2
            forget_device(made)
            assert shown(made) == [(tier,)] * 2
            turn = [*prompt, *first.tokens, 3]
            assert made.explain(turn).latents == {tier: 205}
            second = made.generate([turn], max_new_tokens=6)[0]
            assert second.usage.cached == {tier: 205}
            assert not assert_cold(turn, second.tokens, 6)
            again = made.generate([turn], max_new_tokens=6)[0]
            assert again.usage.cached == {"device": 205} and again.tokens == second.tokens, "it is here again"
            written(made)
            again = made.generate([prompt], max_new_tokens=6)[0]
            assert again.tokens == first.tokens and sum(again.usage.cached.values()) == 192
            assert made.statistics().restored_tokens[tier] >= 205
            assert made.statistics().written == {tier: 3}, "what the tier has is not written again"
        conserved(made)


def test_what_waits_to_be_copied_is_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(9)
    monkeypatch.setattr("kda_jax.engine.copying.PIECES", 0)
    with eager(host_nbytes=2**20) as made:
        first = made.generate([prompt], max_new_tokens=4)[0]
        turn = [*prompt, *first.tokens, 1]
        while made.explain(turn).boundary < 203:  # the end of the generation is saved a step later
            time.sleep(0.005)
        made._owner.ask(lambda: made._loop.scheduler.pool.room(10**6, 0.0))
        assert made.explain(turn).latents == {"device": 203}
        monkeypatch.setattr("kda_jax.engine.copying.PIECES", 1)
        written(made)
        made._owner.ask(lambda: made._loop.scheduler.pool.room(10**6, 0.0))
        second = made.generate([turn], max_new_tokens=4)[0]
        assert second.usage.cached == {"host": 203} and not assert_cold(turn, second.tokens, 4)
    conserved(made)


def test_an_engine_goes_on_where_another_ended(objects: MemoryObjects) -> None:
    """At the end of the last generation, and not of its prompt; from many conversations, whose tokens stay theirs."""
    prompts = [prompt_of(seed, length) for seed, length in enumerate([1, 63, 64, 65, 130, 200, 256])]
    with eager(remote=objects) as made:
        answers = made.generate(prompts, max_new_tokens=5)
        written(made)
    turns = [[*prompt, *answer.tokens, 9, 9] for prompt, answer in zip(prompts, answers)]
    with eager(remote=objects) as other:
        for turn, finished in zip(turns, other.generate(turns, max_new_tokens=5)):
            assert finished.usage.cached == {"remote": len(turn) - 3}, len(turn)
            assert not assert_cold(turn, finished.tokens, 5)
        assert other.generate(turns[3:4], max_new_tokens=5, tenant="x")[0].usage.cached == {}
    conserved(other)


def test_latents_alone_fill_their_boundary_once_for_every_engine(objects: MemoryObjects) -> None:
    prompt = prompt_of(2)
    with eager(remote=objects) as made:
        made.generate([prompt], max_new_tokens=1)
        written(made)
    chain = KeyChain.start(NAMESPACE.digest(), 64).extend(prompt[:192])
    states = [f"state/{chain.key.hex()}", f"state/{chain.extend(prompt[192:]).key.hex()}"]
    assert objects.remove(states, 5.0) == [True, True] and not any(objects.contains(states, 5.0))
    other = [*prompt[:195], 1, 2]
    with eager(remote=objects, creation=Creation(kinds=frozenset({Kind.MISSING}))) as second:
        assert second.explain(other).limits[0].why == "no checkpoint"
        assert second.generate([other], max_new_tokens=1)[0].usage.cached == {}
        written(second)
        assert objects.contains(states, 5.0) == [True, False]
        assert second.statistics().written == {"remote": 1}
    with eager(remote=objects) as third:
        sibling = [*prompt[:197], 5]
        finished = third.generate([sibling], max_new_tokens=4)[0]
        assert finished.usage.cached == {"remote": 192} and not assert_cold(sibling, finished.tokens, 4)


@pytest.mark.parametrize("lost", ["all", "checkpoints"])
def test_what_a_store_has_lost_is_written_again(objects: MemoryObjects, lost: str) -> None:
    """It was known to be there; a search finds that it is not, and whoever computes it anew writes it anew."""
    prompt = prompt_of(7)
    with eager(remote=objects) as made:
        first = made.generate([prompt], max_new_tokens=6)[0]
        written(made)
        chain = KeyChain.start(NAMESPACE.digest(), 64)
        states = [f"state/{chain.extend(prompt[:192]).key.hex()}"]
        states.append(f"state/{chain.extend([*prompt, *first.tokens][:205]).key.hex()}")
        assert objects.contains(states, 5.0) == [True, True]
        pages = [page_name(page) for page in chain.extend(prompt).added]
        objects.remove([*states, *pages] if lost == "all" else states, 5.0)
        forget_device(made)
        again = made.generate([prompt], max_new_tokens=6)[0]
        assert again.usage.cached == {} and again.tokens == first.tokens
        written(made)
        assert objects.contains(states, 5.0) == [True, True]


def test_a_script_and_an_engine_read_each_others(objects: MemoryObjects) -> None:
    prompt, parts = prompt_of(3), (programs().graphdef, programs().params)
    shared = Shared(objects, NAMESPACE.digest(), page=64)
    with eager(remote=objects) as made:
        answer = made.generate([prompt], max_new_tokens=5)[0]
        written(made)
        resumed = shared.resume([*prompt, *answer.tokens])
        assert resumed.boundary == 204
        at_192 = shared.resume(prompt)
        assert at_192.boundary == 192 and at_192.state is not None
        here = prefill(parts, [prompt[:192]], capacity=192)[1]
        for want, got in zip(jax.tree.leaves(here), jax.tree.leaves(at_192.state)):
            assert_close("a leaf", np.float64(want), np.float64(got), 2e-5)
        theirs = prompt_of(4)
        _, _, states = prefill(parts, [theirs], boundaries=[128, 200])
        assert shared.publish(theirs, dict(zip((128, 200), states))) == [128, 200]
        finished = made.generate([[*theirs, 4]], max_new_tokens=5)[0]
        assert finished.usage.cached == {"remote": 200} and not assert_cold([*theirs, 4], finished.tokens, 5)


class Failing(MemoryObjects):
    """A store that does not do what it is asked."""

    how = "well"

    def get(self, reads: Sequence[Read], timeout: float) -> list[Any]:
        if self.how == "raises":
            raise RuntimeError("no such store")
        if self.how == "hangs":
            time.sleep(min(timeout, 0.3))
        if self.how in ("forgets", "hangs"):
            return [None] * len(reads)
        found = super().get(reads, timeout)
        if self.how == "loses" and any(read.key.startswith("page/") for read in reads):
            return [None] * len(reads)
        return found


@pytest.mark.parametrize("how", ["raises", "forgets", "hangs", "loses"])
def test_a_store_that_fails_is_a_miss(how: str) -> None:
    prompt = prompt_of(5)
    with Failing() as objects:
        with eager(remote=objects) as made:
            made.generate([prompt], max_new_tokens=1)
            written(made)
        with eager(remote=objects) as other:
            objects.how = how
            finished = other.generate([prompt], max_new_tokens=4)[0]
            assert finished.usage.cached == {} and not assert_cold(prompt, finished.tokens, 4)
            assert other.statistics().computed_tokens == 200
            objects.how = "well"
        conserved(other)


def test_while_one_searches_others_are_served() -> None:
    class Slow(MemoryObjects):
        held = threading.Event()

        def get(self, reads: Sequence[Read], timeout: float) -> list[Any]:
            self.held.wait(min(timeout, 5.0))
            return super().get(reads, timeout)

    with Slow() as objects, eager(remote=objects) as made:
        waiting = made.submit(prompt_of(6), max_new_tokens=1)
        cancelled = made.submit(prompt_of(6), max_new_tokens=1)
        expires = made.submit(prompt_of(6), max_new_tokens=1, timeout=0.02)
        assert made.generate([[1]], max_new_tokens=3)[0].tokens == tuple(cold([1], 3).tokens)
        assert cancelled.cancel() and cancelled.result(5.0).reason == "cancelled"
        assert expires.result(5.0).reason == "expired"
        assert made.statistics().waiting == 1 and not waiting.tokens()
        objects.held.set()
        assert waiting.result(5.0).reason == "length"
    conserved(made)


def test_a_write_that_fails_is_counted_and_forgotten() -> None:
    class Full(MemoryObjects):
        def put(self, items: Any, timeout: float) -> list[Any]:
            raise RuntimeError("full")

    with Full() as objects, eager(remote=objects, host_nbytes=2**20) as made:
        made.generate([prompt_of(7)], max_new_tokens=3)
        written(made)
        numbers = made.statistics()
        assert numbers.unwritten == {"remote": 2} and numbers.written == {"host": 2}


def test_loading_is_chosen_where_it_is_quicker() -> None:
    prompt = prompt_of(8)
    for load_s, expected in ((0.0, {"host": 192}), (100.0, {})):
        rates = Rates()
        rates.prefill.add(1000.0, 1.0)
        rates.loads[Tier.HOST].add(1.0, load_s)
        with engine(rates=rates, creation=ENDS, host_nbytes=2**20) as made:
            made.generate([prompt], max_new_tokens=1)
            written(made)
            forget_device(made)
            assert made.generate([prompt], max_new_tokens=1)[0].usage.cached == expected


def test_a_line_is_fitted_to_what_calls_took() -> None:
    line = Line()
    assert line.at(5.0) == 0.0
    for size in (1.0, 10.0, 100.0, 50.0):
        line.add(size, 2.0 + 0.5 * size)
    assert line.at(1000.0) == pytest.approx(502.0)
    even = Line()
    for _ in range(3):
        even.add(4.0, 8.0)
    assert even.at(400.0) == pytest.approx(8.0), "calls of one size say nothing about another"
    falling = Line()
    falling.add(1.0, 5.0)
    falling.add(9.0, 1.0)
    assert falling.at(100.0) > 0


def test_a_prompt_is_read_beside_others_in_pieces_that_take_as_long_as_their_tokens() -> None:
    """A row takes 1 ms and a step 2; a token of a prefill takes 0.05 ms, and steps of both count for prefills too."""
    rates = Rates()
    assert rates.beside(8, 64, 512) == 64, "before anything was measured"
    for rows in (1, 8):
        rates.step(0, rows, 0.002 + 0.001 * rows)
    rates.step(128, 0, 0.0064)
    rates.step(512, 8, 0.010 + 0.0256)
    assert [rates.beside(rows, 64, 512) for rows in (1, 8, 30)] == [64, 128, 512]


@pytest.mark.parametrize("method", ["rows", "slot"])
def test_a_load_that_breaks_is_computed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong on a loading thread, nobody waits for it."""
    prompt = prompt_of(31)

    def breaks(*args: Any) -> Any:
        raise MemoryError("no room on the host")

    with eager(host_nbytes=2**20) as made:
        made.generate([prompt], max_new_tokens=2)
        written(made)
        forget_device(made)
        monkeypatch.setattr(Portable, method, breaks)
        again = made.submit(prompt, max_new_tokens=2).result(20.0)
        assert not again.usage.cached and not assert_cold(prompt, again.tokens, 2)
    conserved(made)


@pytest.mark.parametrize("method", ["page", "state"])
def test_a_copy_that_breaks_is_counted(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any) -> Any:
        raise MemoryError("no room on the host")

    monkeypatch.setattr(Portable, method, breaks)
    with eager(host_nbytes=2**20) as made:
        made.generate([prompt_of(32)], max_new_tokens=2)
        written(made)
        assert made.statistics().unwritten == {"host": 2}
    conserved(made)


def test_a_search_that_nobody_waits_for_any_more_is_not_begun(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was slow for a while has no queue of old searches before it."""
    monkeypatch.setattr("kda_jax.engine.slower.MOST", 0.05)
    go, asked = threading.Event(), []
    exists = objects.contains

    def slow(keys: Sequence[str], timeout: float) -> list[bool]:
        asked.append(keys)
        go.wait(20.0)
        return exists(keys, timeout)

    monkeypatch.setattr(objects, "contains", slow)
    with eager(remote=objects) as made:
        streams = [made.submit(prompt_of(seed), max_new_tokens=1) for seed in range(12)]
        for stream in streams:
            assert stream.result(60.0).tokens
        begun = len(asked)
        go.set()
        made._slower._searches.shutdown()
        assert begun == 4 and len(asked) - begun <= 2 * 4, "of the four that had begun"


def test_a_store_that_was_slow_is_tried_again() -> None:
    """One slow search does not end all searching; where searches stay slow, they are a small part of the time."""
    rates = Rates()
    rates.prefill.add(100.0, 0.1)
    rates.search.add(1.0, 1.0)
    assert not rates.worth_searching(100)
    asked = [rates.worth_searching(100) for _ in range(200)]
    first = asked.index(True)
    assert 95 <= first <= 100, "after 10 s of computing"
    assert all(asked[first:]), "nothing is known of it any more"
    searches = 0
    for _ in range(1000):
        if rates.worth_searching(100):
            rates.search.add(1.0, 1.0)
            searches += 1
    assert 5 <= searches <= 11
    rates.search = Line()
    rates.search.add(1.0, 0.01)
    assert rates.worth_searching(100)


class Steady(Rates):
    """A token of a prompt takes 10 ms, whatever was measured."""

    def compute(self, tokens: int) -> float:
        return 0.01 * tokens


def test_a_tier_whose_load_was_slow_is_tried_again() -> None:
    """192 tokens take 1.92 s and a load took 3: a load is made when 30 s were computed, and it is quick."""
    prompt, rates = prompt_of(40), Steady()
    with engine(rates=rates, creation=ENDS, host_nbytes=2**20) as made:
        made.generate([prompt], max_new_tokens=1)
        written(made)
        rates.loads[Tier.HOST].add(1.0, 3.0)
        tiers = []
        for _ in range(20):
            forget_device(made)
            tiers += made.generate([prompt], max_new_tokens=1)[0].usage.cached
            written(made)
        assert tiers == ["host"] * 4, "30 / 1.92 = 15.6"
    conserved(made)


def test_a_quick_tier_is_not_forgotten_beside_a_slow_one() -> None:
    """Both are left out, and one of them is why."""
    both = Source(0, 500, Tier.HOST), Source(500, 1000, Tier.REMOTE)
    plans = [
        ResumePlan(1000, None, Tier.REMOTE, both, 1000, 1000, (), ()),
        ResumePlan(0, None, None, (), 1000, 1000, (), ()),
    ]
    rates = Steady()
    rates.loads[Tier.HOST].add(1.0, 0.1)
    rates.loads[Tier.REMOTE].add(1.0, 30.0)
    for _ in range(30):  # 10 s each
        assert rates.loads[Tier.REMOTE].count == 1.0
        rates.started(plans[1], plans)
    assert rates.loads[Tier.REMOTE].count == 0.0 and rates.loads[Tier.HOST].count == 1.0


def test_a_tier_whose_loads_fail_is_tried_again_and_again(objects: MemoryObjects) -> None:
    """Failed loads are a small part of the time, and when they are over the tier is used again."""
    plan = ResumePlan(1000, None, Tier.REMOTE, (Source(0, 1000, Tier.REMOTE),), 1000, 1000, (), ())
    near = ResumePlan(0, None, None, (), 1000, 1000, (), ())
    rates = Steady()

    def start() -> bool:
        chosen = min((plan, near), key=lambda each: rates.seconds(each, 1100))
        rates.started(chosen, [plan, near])
        return chosen is plan

    assert start(), "nothing is known of it"
    loads = 0
    for _ in range(1000):  # 10 s each
        rates.loads[Tier.REMOTE].add(0.0, 30.0)
        while not start():
            loads += 1
    assert 25 <= loads / 1000 <= 35
    rates.loads[Tier.REMOTE].add(1e6, 0.1)
    assert sum(start() for _ in range(100)) >= 100 - 30
