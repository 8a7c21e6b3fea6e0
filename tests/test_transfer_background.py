"""Background: in order, never waits, drops with a count."""

from __future__ import annotations

import threading
from time import monotonic

import numpy as np
import pytest

from transfer import Closed, Item, Put
from transfer.background import Background
from transfer.memory import MemoryObjects

LONG = 20.0


def test_objects_are_put_off_the_callers_thread() -> None:
    objects, thread = MemoryObjects(), []
    with Background() as background:
        put = background.submit(objects.put, [Item("a", [np.arange(5, dtype=np.uint8)])], LONG)
        where = background.submit(lambda: thread.append(threading.get_ident()))
        assert put is not None and where is not None
        assert put.result(LONG) == [Put.STORED] and where.result(LONG) is None
    assert thread != [threading.get_ident()] and background.dropped == 0


def test_a_full_queue_drops_at_once_and_counts() -> None:
    go_on, done = threading.Event(), []
    with Background(places=3) as background:
        futures = [background.submit(lambda: go_on.wait(LONG))]
        futures += [background.submit(done.append, i) for i in range(4)]
        start = monotonic()
        assert [future is None for future in futures] == [False, False, False, True, True]
        assert monotonic() - start < LONG / 2 and background.dropped == 2
        go_on.set()
        for future in futures[:3]:
            assert future is not None
            future.result(LONG)
        again = [background.submit(done.append, i) for i in (7, 8)]
        assert [future is None for future in again] == [False, False]
    assert done[:2] == [0, 1] and background.dropped == 2 + (4 - len(done))


def test_an_error_is_the_futures_and_frees_the_place() -> None:
    with Background(places=2) as background:
        for _ in range(5):
            failed = background.submit(int, "x")
            assert failed is not None and isinstance(failed.exception(LONG), ValueError)
            after = background.submit(int)  # behind it, so its place is free once this one has ended
            assert after is not None and after.result(LONG) == 0


def test_close_waits_for_what_runs_and_drops_what_waits() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def run() -> None:
        begun.set()
        go_on.wait(LONG)
        done.append("ran")

    background = Background()
    background.submit(run)
    waiting = background.submit(done.append, "waited")
    assert begun.wait(LONG)
    threading.Timer(0.05, go_on.set).start()
    background.close()
    assert done == ["ran"] and waiting is not None and waiting.cancelled() and background.dropped == 1
    with pytest.raises(Closed, match="after it was closed"):
        background.submit(int)
    background.close()


def test_there_is_a_place() -> None:
    with pytest.raises(ValueError, match="places=0"):
        Background(0)
