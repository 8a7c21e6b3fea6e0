"""Work that a second thread does meanwhile: copies and digests, which end soon and let other threads run."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
Made = TypeVar("Made")


class Beside:
    """A thread of its own, for one piece of work after the other; this one if none can be started, as when the
    interpreter ends.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        try:  # not `Thread.start`, which waits until the new thread has a core
            _thread.start_new_thread(self._work, ())
            self._alone = False
        except RuntimeError:
            self._alone = True

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Begins the work when what came before has ended."""
        future: Future[T] = Future()
        job = partial(_settle, future, work)
        if self._alone:
            job()
        else:
            self._todo.put(job)
        return future

    def close(self) -> None:
        """No work follows; the thread ends after what it has."""
        self._todo.put(None)

    def _work(self) -> None:
        while job := self._todo.get():
            job()
            del job  # and with it what it holds, before the next one is waited for


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # it is the waiting thread's
        future.set_exception(error)


def ahead(make: Callable[[T], Made], each: Sequence[T]) -> Generator[Made, None, None]:
    """What is made of each, in order. While the caller is busy with one the next one is made, and no other: what is
    made may use the memory of the last but one.

    To be closed by who stops before the end: no work goes on after that.
    """
    if len(each) < 2:  # nothing can be done meanwhile
        yield from map(make, each)
        return
    beside, coming = Beside(), None
    try:
        for i in range(len(each)):
            made = coming.result() if coming else make(each[i])
            coming = beside.do(partial(make, each[i + 1])) if i + 1 < len(each) else None
            yield made
    finally:
        if coming:
            coming.exception()  # waits for it
        beside.close()
