"""Work that a second thread does meanwhile: copies and digests, which end soon and let other threads run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")
Made = TypeVar("Made")


def beside(work: Callable[[], T]) -> Future[T]:
    """Does the work on a thread of its own; on this one if none can be started, as when the interpreter ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # it is the waiting thread's
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="transfer-beside", daemon=True).start()
    except RuntimeError:
        run()
    return future


def ahead(make: Callable[[T], Made], each: Sequence[T]) -> Generator[Made, None, None]:
    """What is made of each, in order. While the caller is busy with one the next one is made, and no other: what is
    made may use the memory of the last but one.

    To be closed by who stops before the end: no work goes on after that.
    """
    coming: Future[Made] | None = None
    try:
        for i in range(len(each)):
            made = coming.result() if coming else make(each[i])
            coming = beside(partial(make, each[i + 1])) if i + 1 < len(each) else None
            yield made
    finally:
        if coming:
            coming.exception()  # waits for it
