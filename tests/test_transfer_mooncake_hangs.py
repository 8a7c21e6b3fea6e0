"""MooncakeObjects over a store object that hangs: deadlines, memory that a hung call holds, the breaker, close."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from time import monotonic, sleep

import numpy as np
import pytest

from mooncake_fake import FakeStore, Open, item, opening, outcomes, random_bytes
from transfer import Bytes, Closed, Item, Put, Read
from transfer.counters import Recorder
from transfer.mooncake import call
from transfer.mooncake.breaker import Breaker
from transfer.mooncake.puts import STRAIGHT

SOON, LONG = 0.1, 20.0  # a deadline that shall pass, and one that shall not


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def opened(store: FakeStore) -> Iterator[Open]:
    with opening(store) as opened:
        yield opened


def ends(thread: threading.Thread) -> bool:
    thread.join(LONG)
    return not thread.is_alive()


def wait_until(true: object) -> None:
    end = monotonic() + LONG
    while not true():  # type: ignore[operator]
        assert monotonic() < end
        sleep(0.005)


def test_a_call_ends_by_its_deadline(store: FakeStore, opened: Open) -> None:
    objects = opened()
    objects.put([item("a")], LONG)
    store.open.clear()
    calls = [
        (lambda: objects.put([item("x"), item("y")], SOON), [Put.LATE] * 2),
        (lambda: objects.get([Read("a")], SOON), [None]),
        (lambda: objects.contains(["a"], SOON), [False]),
        (lambda: objects.remove(["a"], SOON), [False]),
        (lambda: objects.contains(["b"], SOON), [False]),  # no thread is left for this one
        (lambda: objects.put([item("z")], SOON), [Put.LATE]),
    ]
    for do, expected in calls:
        start = monotonic()
        assert do() == expected
        assert monotonic() - start < 10 * SOON
    assert outcomes(objects.counters(), "put") == {"stored": 1, "late": 3}
    store.open.set()
    wait_until(lambda: not objects.contains(["a"], LONG)[0])  # the late remove ends too
    objects.close()
    assert not {"b", "z"} & {key for _, key in store.asked}  # but nothing begins after its deadline


def test_what_is_known_at_the_deadline_is_told(
    store: FakeStore, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two batches the second one hangs."""
    monkeypatch.setattr(call, "BATCH_NBYTES", 1000)
    objects, big = opened(), random_bytes(501)
    store.hang_at = ("put", "second")
    assert objects.put([Item("first", [big]), Item("second", [big])], 10 * SOON) == [Put.STORED, Put.LATE]
    store.let_go.set()


@pytest.mark.parametrize("operation", ["put", "get"])
def test_no_batch_begins_after_the_deadline(
    store: FakeStore, opened: Open, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(call, "BATCH_NBYTES", 1000)
    objects, items = opened(close_s=LONG), [item("first", 501), item("second", 501)]
    if operation == "get":
        objects.put(items, LONG)
    store.asked.clear()
    store.hang_at = (operation, "first")
    if operation == "put":
        assert objects.put(items, SOON) == [Put.LATE] * 2
    else:
        assert objects.get([Read(put.key, 0, 501) for put in items], SOON) == [None] * 2
    store.let_go.set()
    sleep(SOON)  # else it is the close that stops it
    objects.close()
    assert "second" not in {key for _, key in store.asked}


def test_retries_end_before_the_deadline(store: FakeStore, opened: Open) -> None:
    store.always["put"] = -200
    objects, start = opened(tries=1000), monotonic()
    assert objects.put([item()], 5 * SOON) == [Put.FULL]  # not late
    assert monotonic() - start < 20 * SOON and objects.counters().retries > 0


@pytest.mark.parametrize("nbytes", [100, STRAIGHT])
def test_memory_of_a_hung_get_is_not_used_again(store: FakeStore, opened: Open, nbytes: int) -> None:
    objects = opened()
    objects.put([item("a", nbytes, 1), item("b", nbytes, 2)], LONG)
    assert objects.get([Read("a", 0, nbytes)], LONG)[0] is not None  # from here on there is memory to reuse
    store.hang_at = ("get", "a")
    assert objects.get([Read("a", 0, nbytes)], SOON) == [None]
    values = [objects.get([Read("b", 0, nbytes)], LONG)[0] for _ in range(3)]
    store.let_go.set()  # the hung call writes now
    wait_until(lambda: store.running == 0)
    for value in values:
        assert value is not None and value.tobytes() == store.values["b"]


def test_memory_of_a_hung_put_is_not_used_again(store: FakeStore, opened: Open) -> None:
    objects = opened()
    objects.put([item("a")], LONG)
    store.hang_at = ("put", "hung")
    assert objects.put([item("hung", seed=1)], SOON) == [Put.LATE]
    assert objects.put([item(f"k{i}", seed=2) for i in range(3)], LONG) == [Put.STORED] * 3
    store.let_go.set()
    wait_until(lambda: "hung" in store.values)
    assert store.values["hung"] == item(seed=1).pieces[0].tobytes()


def test_pieces_of_a_hung_put_stay_alive(store: FakeStore, opened: Open) -> None:
    objects, nbytes = opened(), 2 * STRAIGHT
    store.hang_at = ("put", "hung")
    assert objects.put([Item("hung", [random_bytes(nbytes, 1)])], SOON) == [Put.LATE]
    gc.collect()
    others = [np.zeros(nbytes, np.uint8) for _ in range(8)]
    store.let_go.set()
    wait_until(lambda: "hung" in store.values)
    assert store.values["hung"] == random_bytes(nbytes, 1).tobytes() and others


# The breaker.


def test_the_breaker_opens_after_failures_in_a_row_and_lets_one_call_try() -> None:
    now, recorder = [0.0], Recorder()
    breaker = Breaker(3, 5.0, recorder, clock=lambda: now[0])
    state = lambda: (recorder.snapshot().breaker, recorder.snapshot().opened)  # noqa: E731
    for well in (False, False, True, False, False):
        assert breaker.enter()
        breaker.leave(well)
    assert state() == ("closed", 0)
    assert breaker.enter()
    breaker.leave(False)
    assert state() == ("open", 1) and not breaker.enter()
    now[0] = 4.99
    assert not breaker.enter()
    now[0] = 5.0
    assert breaker.enter() and not breaker.enter() and state() == ("half-open", 1)
    breaker.leave(False)
    assert state() == ("open", 2) and not breaker.enter()
    now[0] = 9.99
    assert not breaker.enter()
    now[0] = 10.0
    assert breaker.enter()
    breaker.leave(True)
    assert state() == ("closed", 2) and breaker.enter() and breaker.enter()
    breaker.leave(False)
    breaker.leave(False)
    assert state() == ("closed", 2)


@pytest.mark.parametrize("code", [-800, -900, -901])
@pytest.mark.parametrize("operation", ["put", "get", "contains"])
def test_a_sick_store_is_left_alone(store: FakeStore, opened: Open, operation: str, code: int) -> None:
    objects = opened(failures=3, pause_s=0.3, tries=1)
    objects.put([item("a")], LONG)
    calls = {
        "put": lambda: objects.put([item("b")], LONG)[0].there,
        "get": lambda: objects.get([Read("a")], LONG)[0] is not None,
        "contains": lambda: objects.contains(["a"], LONG)[0],
    }
    method = {"contains": "batch_is_exist"}.get(operation, operation)
    store.always[method] = code
    assert not any(calls[operation]() for _ in range(3))
    asked = len(store.asked)
    assert objects.counters().breaker == "open"
    assert not any(call() for call in calls.values()) and not objects.remove(["a"], LONG)[0]
    assert len(store.asked) == asked
    assert outcomes(objects.counters(), "remove") == {"open": 1}
    del store.always[method]
    wait_until(calls[operation])
    assert objects.counters().breaker == "closed" and all(call() for call in calls.values())


@pytest.mark.parametrize("code", [-200, -600, -704, -703, -707])
def test_other_failures_leave_the_breaker_closed(store: FakeStore, opened: Open, code: int) -> None:
    objects = opened(failures=1, tries=1)
    objects.put([item("a")], LONG)
    store.always |= {"get": code, "put": code}
    assert objects.get([Read("a")], LONG) == [None] and not objects.put([item("b")], LONG)[0].there
    assert objects.counters().breaker == "closed"


def test_calls_that_are_late_open_the_breaker(store: FakeStore, opened: Open) -> None:
    objects = opened(failures=2, pause_s=LONG)
    store.open.clear()
    for _ in range(2):
        assert objects.contains(["a"], SOON) == [False]
    start = monotonic()
    assert objects.get([Read("a")], LONG) == [None] and objects.put([item()], LONG) == [Put.FAILED]
    assert monotonic() - start < 5 and objects.counters().dropped == 1


# Close.


def test_close_waits_for_calls_and_refuses_later_ones(store: FakeStore, opened: Open) -> None:
    objects = opened(close_s=LONG)
    objects.put([item("a")], LONG)
    store.open.clear()
    found: list[Bytes | None] = []
    getting = threading.Thread(target=lambda: found.extend(objects.get([Read("a", 0, 100)], LONG)))
    getting.start()
    store.waiting.acquire()
    closing = threading.Thread(target=objects.close)
    closing.start()
    wait_until(lambda: objects._threads.closing.is_set())
    for late in (lambda: objects.get([Read("a")], LONG), lambda: objects.put([], LONG)):
        with pytest.raises(Closed, match="after it was closed"):
            late()
    assert not store.closed
    store.open.set()
    assert ends(getting) and ends(closing) and store.closed == 1
    assert found[0] is not None and found[0].tobytes() == store.values["a"]
    objects.close()
    assert store.closed == 1


def test_close_does_not_wait_longer_than_it_may(
    store: FakeStore, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    objects = opened(close_s=SOON, threads=1)
    store.open.clear()
    assert objects.contains(["a"], SOON) == [False]
    waiting = threading.Thread(target=lambda: objects.contains(["b"], LONG))
    waiting.start()
    start = monotonic()
    objects.close()
    assert monotonic() - start < 10 * SOON and not store.closed and "still runs" in caplog.text
    store.open.set()
    wait_until(lambda: store.closed)  # by the thread that hung
    assert ends(waiting) and ("batch_is_exist", "b") not in store.asked


def test_close_ends_the_pause_between_tries(store: FakeStore, opened: Open) -> None:
    objects = opened(close_s=LONG, tries=1000)
    store.always["put"] = -200
    puts: list[Put] = []
    putting = threading.Thread(target=lambda: puts.extend(objects.put([item()], LONG)))
    putting.start()
    wait_until(lambda: objects.counters().retries)
    start = monotonic()
    objects.close()
    assert monotonic() - start < 5 and ends(putting) and puts == [Put.FULL] and store.closed


def test_a_process_that_ends_waits_for_a_hung_call() -> None:
    """Else the library would be torn down under a thread that runs in it."""
    program = """
import threading
from mooncake_fake import FakeStore, fake
from transfer.mooncake import MooncakeObjects
store = FakeStore()
store.close = lambda: print("closed", store.running)
objects = MooncakeObjects(library=fake(store))
store.open.clear()
print(objects.contains(["a"], 0.05))
release = threading.Timer(0.3, store.open.set)
release.daemon = True
release.start()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "[False]\nclosed 0\n"), ended.stderr
