"""A stand-in for Mooncake's store object: moves real bytes by address, and fails, waits or lies when told to."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from transfer import Counters, Item
from transfer.mooncake import MooncakeObjects, MooncakeSettings
from transfer.mooncake.library import Library

Open: TypeAlias = Callable[..., MooncakeObjects]


class FakeStore:
    """What the adapter uses, with the real one's codes. Every address that is written to must be registered, as the
    real one wants it over TCP; with `rdma` also every address that is read from.

    Attributes:
        codes: by method, codes that its next objects get instead of what is true; nothing happens to an object that
            gets one, except for 0 of a put and a get, which mean what is true.
        always: by method, the code that all get.
        sessions: what is written of objects that are being put.
        raises: by method, what it raises.
        swallow: puts that end with 0 and store nothing.
        open: cleared, every call waits until it is set again.
        hang_at: a method and a key; one such call waits until `let_go` is set, while others go on.
        waiting: counts calls that wait, or did.
        running: calls that have begun and not ended.
        asked: (method, key) in order; `batches`: (method, number of keys) a call.
    """

    def __init__(self, *, rdma: bool = False) -> None:
        self.values: dict[str, bytes] = {}
        self.sessions: dict[str, bytearray] = {}
        self.groups: dict[str, str] = {}
        self.registered: dict[int, int] = {}
        self.codes: dict[str, deque[int]] = {}
        self.always: dict[str, int] = {}
        self.swallow = 0
        self.rdma = rdma
        self.raises: dict[str, Exception] = {}
        self.open, self.let_go = threading.Event(), threading.Event()
        self.open.set()
        self.hang_at: tuple[str, str] | None = None
        self.waiting = threading.Semaphore(0)
        self.running = 0
        self._lock = threading.Lock()
        self.asked: list[tuple[str, str]] = []
        self.batches: list[tuple[str, int]] = []
        self.closed = 0
        self.after_close: list[str] = []

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self._alive("register_buffer")
        if any(buffer_ptr < at + n and at < buffer_ptr + size for at, n in self.registered.items()):
            return -600
        self.registered[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        self._alive("unregister_buffer")
        return 0 if self.registered.pop(buffer_ptr, None) else -600

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        with self._running("batch_is_exist", keys):
            return [self._code("batch_is_exist", int(key in self.values)) for key in keys]

    def get_size(self, key: str, /) -> int:
        with self._running("get_size", [key]):
            return self._code("get_size", len(self.values[key]) if key in self.values else -704)

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: Any) -> list[int]:
        with self._running("start", keys):
            groups = getattr(config, "group_ids", None) or [""] * len(keys)
            return [
                self._code("start", None) or self._start(key, size, group)
                for key, size, group in zip(keys, sizes, groups, strict=True)
            ]

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        with self._running("put", keys):
            return [
                self._code("put", None) or self._write(key, list(zip(*runs, strict=True)))
                for key, *runs in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True)
            ]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        with self._running("end", keys):
            return [self._code("end", None) or self._end(key) for key in keys]

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        self._alive("revoke")
        return [0 if self.sessions.pop(key, None) is not None else -600 for key in keys]

    def get_into_ranges(
        self,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        with self._running("get", [key for keys in all_keys for key in keys]):
            return [
                [
                    [
                        self._code("get", None) or self._get(key, at + to, start, nbytes)
                        for to, start, nbytes in zip(*parts, strict=True)
                    ]
                    for key, *parts in zip(keys, tos, starts, sizes, strict=True)
                ]
                for at, keys, tos, starts, sizes in zip(
                    buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True
                )
            ]

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        with self._running("batch_remove", keys):
            return [self._code("batch_remove", 0 if self.values.pop(key, None) else -704) for key in keys]

    def close(self) -> int:
        self._alive("close")
        self.closed += 1
        return 0

    def _start(self, key: str, size: int, group: str) -> int:
        with self._lock:
            if key in self.values or key in self.sessions:
                return -705 if key in self.values else -600
            self.sessions[key] = bytearray(size)
            self.groups[key] = group
            return 0

    def _write(self, key: str, runs: list[tuple[int, int, int]]) -> int:
        if not runs or any(nbytes <= 0 for _, nbytes, _ in runs):
            return -600
        if self.rdma and not all(self._is_registered(*run) for *run, _ in runs):
            return -600
        for address, nbytes, to in runs:
            self.sessions[key][to : to + nbytes] = ctypes.string_at(address, nbytes)
        return sum(nbytes for _, nbytes, _ in runs)

    def _end(self, key: str) -> int:
        value = bytes(self.sessions.pop(key))
        if self.swallow:
            self.swallow -= 1
        else:
            self.values[key] = value
        return 0

    def _get(self, key: str, to: int, start: int, nbytes: int) -> int:
        if key not in self.values:
            return -704
        if start + nbytes > len(self.values[key]) or not self._is_registered(to, nbytes):
            return -600
        ctypes.memmove(to, self.values[key][start : start + nbytes], nbytes)
        return nbytes

    def _is_registered(self, address: int, nbytes: int) -> bool:
        return any(at <= address and address + nbytes <= at + n for at, n in self.registered.items())

    @contextmanager
    def _running(self, method: str, keys: list[str]) -> Iterator[None]:
        """A call from its begin to its end, with what it has to wait for between."""
        self._alive(method)
        self.batches.append((method, len(keys)))
        self.asked += [(method, key) for key in keys]
        with self._lock:
            self.running += 1
        try:
            if method in self.raises:
                raise self.raises[method]
            if self.hang_at in [(method, key) for key in keys]:
                self.hang_at = None
                self._wait(self.let_go)
            self._wait(self.open)
            yield
        finally:
            with self._lock:
                self.running -= 1

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            self.waiting.release()
            event.wait()

    def _code(self, method: str, truth: Any) -> Any:
        queue = self.codes.get(method)
        return queue.popleft() if queue else self.always.get(method, truth)

    def _alive(self, method: str) -> None:
        if self.closed:
            self.after_close.append(method)


def fake(store: FakeStore, *, groups: bool = True) -> Library:
    """A library around it, of a version with or without groups."""
    return Library(store, lambda: SimpleNamespace(group_ids=None) if groups else SimpleNamespace())


def codes(*numbers: int) -> deque[int]:
    """Codes for the next objects of a method."""
    return deque(numbers)


@contextmanager
def opening(store: FakeStore) -> Iterator[Open]:
    """Opens adapters on the store. At the end lets go on what waits, closes them, and sees that no call came after."""
    all_opened: list[MooncakeObjects] = []

    def opened(groups: bool = True, **settings: Any) -> MooncakeObjects:
        settings = {"close_s": 0.2, "failures": 100, **settings}
        all_opened.append(MooncakeObjects(MooncakeSettings(**settings), fake(store, groups=groups)))
        return all_opened[-1]

    try:
        yield opened
    finally:
        store.open.set()
        store.let_go.set()
        for objects in all_opened:
            objects.close()
    assert not store.after_close and not store.sessions


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    """Bytes of that seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def item(key: str = "k", nbytes: int = 100, seed: int = 0) -> Item:
    """An object of one piece of random bytes."""
    return Item(key, [random_bytes(nbytes, seed)])


def outcomes(counters: Counters, operation: str) -> dict[str, int]:
    """How many objects of an operation ended in each way."""
    return {word: done.objects for (name, word), done in counters.operations.items() if name == operation}
