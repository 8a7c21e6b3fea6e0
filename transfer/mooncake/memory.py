"""Memory that the library may move bytes to and from: registered, and warm where it was used before."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from transfer.errors import TransferError
from transfer.mooncake.library import Store
from transfer.objects import Bytes


class _Lent:
    """What arrays over a block have as their base: when the last of them is gone, so is this, and the block is free."""

    __slots__ = ("__array_interface__", "_block", "_give_back")

    def __init__(self, block: Bytes, nbytes: int, give_back: Callable[[Bytes], None]) -> None:
        self._block, self._give_back = block, give_back
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (block.ctypes.data, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:  # at any moment, on any thread: takes no lock
        self._give_back(self._block)


class Memory:
    """Blocks on page boundaries. A block is lent again only when no array over it exists any more, so neither a value
    that somebody holds nor a buffer of a call that hangs is ever written to again. From any thread.
    """

    def __init__(self, store: Store, recycled_bytes: int) -> None:
        """`recycled_bytes` is the most memory that is kept registered; beyond it blocks are used once."""
        self._store, self._limit = store, recycled_bytes
        self._lock = threading.Lock()
        self._given_back: deque[Bytes] = deque()
        self._idle: list[Bytes] = []  # the one that was given back longest ago first
        self._recycled = 0  # bytes, idle or lent

    @contextmanager
    def lent(self, sizes: Sequence[int]) -> Iterator[list[Bytes]]:
        """Arrays of such sizes, registered until the end of this context and the caller's as long as it holds them.

        Raises:
            TransferError: the library refused to register memory.
        """
        used_once: list[Bytes] = []
        try:
            yield [self._lend(nbytes, used_once) for nbytes in sizes]
        finally:
            for block in used_once:
                self._store.unregister_buffer(block.ctypes.data)

    def _lend(self, nbytes: int, used_once: list[Bytes]) -> Bytes:
        size = rounded(nbytes)
        with self._lock:
            while self._given_back:
                self._idle.append(self._given_back.popleft())
            block = next((block for block in reversed(self._idle) if block.nbytes == size), None)
            if block is not None:
                self._idle = [other for other in self._idle if other is not block]
            else:
                while self._idle and self._recycled + size > self._limit:
                    self._forget(self._idle.pop(0))
                block = self._fresh(size)
                if self._recycled + size > self._limit:
                    used_once.append(block)
                    return block[:nbytes]
                self._recycled += size
        return np.asarray(_Lent(block, nbytes, self._given_back.append))

    def _fresh(self, nbytes: int) -> Bytes:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        block = np.frombuffer(mapped, np.uint8)
        code = self._store.register_buffer(block.ctypes.data, nbytes)
        if code:
            raise TransferError(f"Mooncake refused to register {nbytes} bytes, with {code}")
        return block

    def _forget(self, block: Bytes) -> None:
        self._recycled -= block.nbytes
        self._store.unregister_buffer(block.ctypes.data)


def rounded(nbytes: int) -> int:
    """The next multiple of 64 KiB, or of an eighth of a power of two, so that blocks fit again."""
    step = 1 << max(16, (nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step
