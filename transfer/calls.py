"""What every store of objects does with a call before it does anything: refuse wrong use, and use after close."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from transfer.errors import Closed
from transfer.objects import Item, Read

KEY = re.compile(r"[A-Za-z0-9._/-]{1,512}", re.ASCII)


def check_puts(items: Sequence[Item]) -> None:
    """Raises ValueError for keys and groups that are none, equal keys, and objects that are empty or not bytes."""
    keys = [item.key for item in items]
    check_keys([*keys, *(item.group for item in items if item.group is not None)])
    if len(set(keys)) != len(keys):
        raise ValueError(f"a put has distinct keys, got {keys}")
    for item in items:
        for piece in item.pieces:
            if piece.dtype.str != "|u1" or piece.ndim != 1 or not piece.flags.c_contiguous:
                raise ValueError(
                    f"{item.key}: a piece is contiguous uint8 [nbytes], got {piece.dtype} {piece.shape};"
                    " use .reshape(-1).view(np.uint8) of a contiguous array"
                )
        if not item.nbytes:
            raise ValueError(f"{item.key}: an object has at least one byte")


def check_reads(reads: Sequence[Read]) -> None:
    """Raises ValueError for keys that are none, and for negative ranges."""
    check_keys([read.key for read in reads])
    for read in reads:
        if read.start < 0 or (read.nbytes is not None and read.nbytes < 0):
            raise ValueError(f"{read.key}: a range is not negative, got {read.start=} {read.nbytes=}")


def check_keys(keys: Sequence[str]) -> None:
    """Raises ValueError for what is no key, and no group."""
    for key in keys:
        if not KEY.fullmatch(key):
            raise ValueError(
                f"a key or group is 1 to 512 of the characters A-Z a-z 0-9 . _ - /, got {key!r:.600}"
            )


def deadline(timeout: float) -> float:
    """When a call has to have ended, by `monotonic`. Raises ValueError for a timeout that is not positive."""
    if not timeout > 0:
        raise ValueError(f"{timeout=} must be positive seconds")
    return monotonic() + timeout


class Gate:
    """Lets calls in until it is closed, and knows how many are inside."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._free = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Raises Closed if the gate is closed."""
        with self._free:
            if self._closed:
                raise Closed(f"{self._what} was used after it was closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._free:
                self._inside -= 1
                self._free.notify_all()

    def close(self) -> bool:
        """Lets nobody in any more and waits until all are out. Whether this call closed it."""
        with self._free:
            first, self._closed = not self._closed, True
            self._free.wait_for(lambda: not self._inside)
            return first
