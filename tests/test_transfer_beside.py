"""Work on a second thread: in order, one ahead and no more, waited for, and done without a thread if there is none."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import weakref
from contextlib import closing, suppress
from functools import partial
from time import monotonic, sleep

import numpy as np
import pytest

from transfer.beside import Beside, ahead

LONG = 20.0


class Steps:
    """Makes tenfolds, and notes which and where. `held` does not end before `let_go` is set."""

    def __init__(self, held: int | None = None) -> None:
        self.held, self.let_go = held, threading.Event()
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.threads: list[int] = []
        self.changed = threading.Semaphore(0)

    def make(self, n: int) -> int:
        self.begun.append(n)
        self.threads.append(threading.get_ident())
        self.changed.release()
        assert n != self.held or self.let_go.wait(LONG)
        self.ended.append(n)
        return 10 * n


def test_work_beside_is_done_on_one_other_thread_in_order_and_gives_what_it_gave() -> None:
    here, beside, order = threading.get_ident(), Beside(), []
    threads = [beside.do(threading.get_ident) for _ in range(2)]
    work = [beside.do(lambda n=n: order.append(n)) for n in range(9)]
    assert here != threads[0].result(LONG) == threads[1].result(LONG)
    with pytest.raises(KeyError, match="why"):
        beside.do(lambda: {}["why"]).result(LONG)
    assert all(one.done() for one in work) and order == list(range(9))
    beside.close()


def test_beginning_waits_for_nothing() -> None:
    """Neither for the thread, nor for what it does."""
    let_go, beside = threading.Event(), Beside()
    held, after = beside.do(lambda: let_go.wait(LONG)), beside.do(int)
    beside.close()
    assert not held.done() and not after.done()
    let_go.set()
    assert held.result(LONG) and after.result(LONG) == 0  # what came before the close is done


def test_work_that_was_done_is_not_kept() -> None:
    """While the next is waited for: what it had may be large, or lent."""
    beside, room = Beside(), np.zeros(9)
    alive = weakref.ref(room)
    beside.do(partial(np.sum, room)).result(LONG)
    del room
    end = monotonic() + LONG
    while alive() is not None and monotonic() < end:
        sleep(0.01)
    assert alive() is None
    beside.close()


@pytest.mark.parametrize("ends", ["at the end", "early"])
def test_the_thread_ends_and_keeps_nothing(ends: str) -> None:
    before, things = _thread._count(), [np.zeros(9) for _ in range(3)]
    alive = [weakref.ref(thing) for thing in things]
    with closing(ahead(lambda thing: [thing], things)) as made:
        for _ in range(1 if ends == "early" else 3):
            next(made)
    del made
    things.clear()
    end = monotonic() + LONG
    while (_thread._count() > before or any(one() for one in alive)) and monotonic() < end:
        sleep(0.01)
    assert _thread._count() <= before and not any(one() for one in alive)


@pytest.mark.parametrize("count", range(4))
def test_what_is_made_comes_in_order(count: int) -> None:
    steps = Steps()
    assert list(ahead(steps.make, range(count))) == [10 * n for n in range(count)]
    assert steps.begun == list(range(count))
    assert steps.threads.count(threading.get_ident()) == min(
        count, 1
    )  # the first: nothing can be done meanwhile


def test_one_is_made_while_the_caller_is_busy_and_no_more() -> None:
    steps = Steps()
    with closing(ahead(steps.make, range(9))) as made:
        for n in range(3):
            assert next(made) == 10 * n
            assert all(steps.changed.acquire(timeout=LONG) for _ in range(1 if n else 2))
            assert not steps.changed.acquire(timeout=0.05) and steps.begun == list(range(n + 2))


@pytest.mark.parametrize("fails", [False, True], ids=["stops", "fails"])
def test_whoever_ends_early_waits_for_what_is_being_made(fails: bool) -> None:
    """And nothing is begun any more: the memory that it would use may be another's then."""
    steps = Steps(held=2)
    with suppress(ZeroDivisionError), closing(ahead(steps.make, range(9))) as made:
        assert [next(made), next(made)] == [0, 10]
        assert all(steps.changed.acquire(timeout=LONG) for _ in range(3)) and steps.ended == [0, 1]
        threading.Timer(0.1, steps.let_go.set).start()
        if fails:
            raise ZeroDivisionError
    assert steps.begun == steps.ended == [0, 1, 2]


def test_what_making_raises_comes_at_its_turn() -> None:
    made = ahead(lambda n: 1 // (2 - n), range(9))
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(made)
    assert list(made) == []


def test_without_a_thread_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: object, arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert Beside().do(threading.get_ident).result(0) == threading.get_ident()
    assert list(ahead(str, [1, 2, 3])) == ["1", "2", "3"]


def test_it_is_done_while_the_interpreter_ends() -> None:
    """A checkpoint that is being stored then shall be."""
    program = """
import atexit
from transfer.beside import ahead
atexit.register(lambda: print(list(ahead(str, [1, 2, 3]))))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("['1', '2', '3']\n", "")
