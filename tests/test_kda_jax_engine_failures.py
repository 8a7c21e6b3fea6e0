"""What fails fails alone and says so; nothing hangs, and what was not touched goes on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from engine_rigged import Rigged, fails_once
from engine_site import assert_cold, conserved, engine
from engine_tiers import eager, forget_device, prompt_of, written

from cache.retention import Creation, Kind
from kda_jax.engine import Closed, Memory, Outcome
from kda_jax.engine.execution import Execution

ENDS = Creation(kinds=frozenset({Kind.PROMPT_END, Kind.GENERATION_END}))
PROMPT = [3] * 100


def test_a_prefill_that_fails_fails_its_request_alone() -> None:
    made = Rigged()
    with engine(programs=made) as one:
        other = one.submit([1, 2], max_new_tokens=100)
        next(iter(other))
        made.spoil = fails_once("prefill")
        failed = one.generate([PROMPT], max_new_tokens=4)[0]
        assert failed.outcome is Outcome.FAILED and failed.reason == "failed"
        assert failed.error == "RuntimeError: out of luck"
        assert len(other.result(60.0).tokens) == 100 and not assert_cold([1, 2], other.tokens(), 100)
        assert not assert_cold(PROMPT, one.generate([PROMPT], max_new_tokens=4)[0].tokens, 4)
    conserved(one)


def test_a_decode_that_fails_fails_the_batch_and_no_more() -> None:
    made = Rigged()
    once = fails_once("decode")

    def spoil(name: str, *args: Any) -> None:
        if name == "decode" and np.count_nonzero(args[2]) == 4:  # slots of four rows
            once(name, *args)

    made.spoil = spoil
    with engine(programs=made) as one:
        batch = [one.submit([at], max_new_tokens=400) for at in range(4)]
        waiting = one.submit(PROMPT, max_new_tokens=4)
        assert {stream.result(60.0).error for stream in batch} == {"RuntimeError: out of luck"}
        assert not assert_cold(PROMPT, waiting.result(60.0).tokens, 4)
        assert one.statistics().memory_lost == 0
    conserved(one)


@pytest.mark.parametrize("where", ["decode", "prefill", "zero", "read back"])
def test_memory_that_is_lost_is_made_anew(where: str) -> None:
    """Who runs fails, what was cached on the device is gone, and who waits is served."""
    made = Rigged()
    with engine(programs=made, slots=4, creation=ENDS) as one:
        one.generate([PROMPT], max_new_tokens=1)
        assert one.explain(PROMPT).boundary == 64
        running = [one.submit([at], max_new_tokens=400) for at in range(3)]
        for stream in running:
            next(iter(stream))
        if where == "read back":

            def after(name: str, out: Any) -> Any:
                if name == "decode":
                    made.after = lambda name, out: out
                    out[1].delete()
                return out

            made.after = after
        else:
            made.spoil = fails_once(where, lose=True)
        late = one.submit([7] * 90, max_new_tokens=2)
        for stream in running:
            finished = stream.result(60.0)
            assert finished.outcome is Outcome.FAILED and "memory was lost" in str(finished.error)
        late.result(60.0)
        again = one.generate([PROMPT], max_new_tokens=4)[0]
        assert not assert_cold(PROMPT, again.tokens, 4)
        assert one.statistics().memory_lost == 1
    conserved(one)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_slot_that_is_not_cleared_fails_its_request_alone(slots: int) -> None:
    """The memory was not taken: who runs goes on, and what is cached stays."""
    made = Rigged()
    with engine(programs=made, creation=ENDS) as one:
        one.generate([PROMPT], max_new_tokens=1)
        running = [one.submit([at], max_new_tokens=400) for at in range(slots - 1)]
        for stream in running:
            next(iter(stream))
        made.spoil = fails_once("zero")
        failed = one.generate([[7] * 90], max_new_tokens=2)[0]
        assert failed.outcome is Outcome.FAILED and failed.error == "RuntimeError: out of luck"
        assert not assert_cold([7] * 90, one.generate([[7] * 90], max_new_tokens=2)[0].tokens, 2)
        assert one.generate([PROMPT], max_new_tokens=1)[0].usage.cached == {"device": 64}
        for at, stream in enumerate(running):
            assert len(stream.result(60.0).tokens) == 400 and not assert_cold([at], stream.tokens()[:9], 9)
        assert one.statistics().memory_lost == 0
    conserved(one)


@pytest.mark.parametrize("which", [1, 2], ids=["the first piece", "the second"])
def test_a_load_that_is_not_written_is_computed(which: int) -> None:
    """Nor was the memory taken: the piece before is in it."""
    made, calls = Rigged(), []
    once = fails_once("write_pages")
    made.moved_pages = 1
    made._compiled = {name: each for name, each in made._compiled.items() if "_pages" not in name[0]}

    def spoil(name: str, *args: Any) -> None:
        calls.append(name)
        if calls.count("write_pages") == which:
            once(name, *args)

    made.spoil = spoil
    prompt = prompt_of(1)
    with eager(programs=made, host_nbytes=2**20) as one:
        first = one.generate([prompt], max_new_tokens=4)[0]
        running = one.submit([1], max_new_tokens=300)
        written(one)
        forget_device(one)
        again = one.generate([prompt], max_new_tokens=4)[0]
        assert calls.count("write_pages") == which and again.usage.cached == {}
        assert again.tokens == first.tokens
        assert len(running.result(60.0).tokens) == 300 and one.statistics().memory_lost == 0
    conserved(one)


def test_another_memory_has_the_room_of_the_one_that_was_lost() -> None:
    """Where a pool takes most of a device there is no room for two."""
    made = Rigged()
    execution, empty, gone = Execution(made, {}), made.empty, []
    before = jax.tree.leaves(execution.memory)

    def counted() -> Memory:
        gone.extend(leaf.is_deleted() for leaf in before)
        return empty()

    made.empty = counted
    before[0].delete()
    execution.reset()
    assert len(gone) == len(before) and all(gone)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(execution.memory))


def test_a_snapshot_that_fails_costs_a_checkpoint() -> None:
    made = Rigged()
    made.spoil = fails_once("snapshot")
    with engine(programs=made, creation=ENDS) as one:
        first = one.generate([PROMPT], max_new_tokens=4)[0]
        assert first.outcome is Outcome.FINISHED
        assert one.explain([*PROMPT, *first.tokens]).boundary == 64
    conserved(one)


def test_an_engine_that_breaks_leaves_nobody_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    running = one.submit([1], max_new_tokens=400)
    next(iter(running))

    def broken(*given: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(one._loop.scheduler, "step", broken)
    finished = running.result(60.0)
    assert finished.outcome is Outcome.FAILED and "a bug" in str(finished.error)
    with pytest.raises(Closed, match="a bug"):
        one.submit([1], max_new_tokens=1)
    assert one.statistics().ended["failed"] == 1
    assert not one.drain(0.0) or running.result(0.0)
    one.close()
    assert "the engine failed" in caplog.text


def test_who_arrives_while_an_engine_breaks_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    late = []

    def broken(*given: Any) -> Any:
        late.append(one.submit([1], max_new_tokens=1))
        raise KeyError("a bug")

    monkeypatch.setattr(one._loop.scheduler, "step", broken)
    assert "a bug" in str(one.generate([[1]], max_new_tokens=1)[0].error)
    assert "a bug" in str(late[0].result(10.0).error)
    one.close()


def test_a_copy_that_fails_costs_a_checkpoint_in_the_slower_tiers() -> None:
    """As when the device has no memory for it."""
    made = Rigged()
    made.spoil = fails_once("read_pages")
    with engine(programs=made, host_nbytes=2**20, creation=ENDS) as one:
        assert one.generate([PROMPT], max_new_tokens=4)[0].outcome is Outcome.FINISHED
        assert one.generate([[5] * 100], max_new_tokens=4)[0].outcome is Outcome.FINISHED
        written = one.statistics()
    assert written.unwritten == {"host": 1} and one.statistics().written["host"] >= 1
    conserved(one)


def test_a_turn_that_lets_go_of_a_checkpoint_is_followed_by_another() -> None:
    """It may be the room that a request waits for, and nobody else wakes the engine."""
    made = Rigged()
    made.spoil = fails_once("read_pages")
    with engine(programs=made, host_nbytes=2**20, creation=ENDS) as one:
        one.generate([PROMPT], max_new_tokens=4)
        writing = one._slower.writing

        def turn() -> float | None:
            for key in one._loop._held:
                writing.add(key)
            assert writing.copying.count
            made.spoil = fails_once("read_pages")
            due = one._loop.turn()
            assert not writing.copying.count
            return due

        assert one._owner.ask(turn) is not None
    conserved(one)
