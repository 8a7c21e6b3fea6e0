"""A thread that owns things: others hand it calls, and it takes turns between them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Owner:
    """Does calls in their order, and turns when they are due; what both touch needs no lock."""

    def __init__(self, turn: Callable[[], float | None], failed: Callable[[BaseException], None]) -> None:
        """
        Args:
            turn: called after calls and when it is due; says when that is next, on `time.monotonic`, None for never.
            failed: called, on the thread, with what ended it: a call or a turn that raised.
        """
        self._turn, self._failed = turn, failed
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kda-jax engine", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes turns."""
        return self._thread.is_alive()

    def post(self, call: Callable[[], None]) -> None:
        """Has a call done soon. From any thread; after the end it is not done."""
        self._inbox.put(call)

    def ask(self, call: Callable[[], T]) -> T:
        """Has a call done between two turns and waits for its value; after the end it is done here."""
        answer: Future[T] = Future()

        def answered() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(answered)
        while self.alive:
            try:
                return answer.result(timeout=1.0)
            except TimeoutError:
                if answer.done():
                    raise
        return answer.result() if answer.done() else call()

    def do_rest(self) -> None:
        """Does the calls that have come, on the thread, when one has failed: what others raise is not told."""
        while True:
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                return
            with suppress(Exception):
                call()

    def stop(self) -> None:
        """Ends the thread, after the calls that came before. A second time does nothing."""
        self._inbox.put(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        due: float | None = None
        try:
            while not self._stopping:
                self._take(due)
                due = self._turn()
        except BaseException as error:
            self._failed(error)

    def _take(self, due: float | None) -> None:
        """Does what has come; waits for it until a turn is due."""
        try:
            left = None if due is None else due - time.monotonic()
            call = (
                self._inbox.get_nowait() if left is not None and left <= 0 else self._inbox.get(timeout=left)
            )
            for _ in range(self._inbox.qsize()):  # those that come meanwhile wait for the turn
                call()
                call = self._inbox.get_nowait()
            call()
        except queue.Empty:
            pass
