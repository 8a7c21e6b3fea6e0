"""Work on a second thread: in order, one ahead and no more, waited for, and done without a thread if there is none."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing, suppress

import pytest

from transfer.beside import ahead, beside

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


def test_work_beside_is_done_on_another_thread_and_gives_what_it_gave() -> None:
    here = threading.get_ident()
    assert beside(threading.get_ident).result(LONG) != here
    with pytest.raises(KeyError, match="why"):
        beside(lambda: {}["why"]).result(LONG)


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
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert beside(threading.get_ident).result(0) == threading.get_ident()
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
