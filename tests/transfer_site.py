"""Arrays, stores that watch or fail, and damage, for the tests of transfer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from mooncake_fake import FakeStore, fake
from transfer import Bytes, Counters, DiskObjects, Item, MemoryObjects, Objects, Put, Read
from transfer.dtypes import DTYPES
from transfer.manifest import BODY, signed
from transfer.mooncake import MooncakeObjects

MIB = 2**20
TIMEOUT = 20.0
"""Seconds that no call here comes near."""


def memory(request: pytest.FixtureRequest) -> Objects:
    return MemoryObjects()


def disk(request: pytest.FixtureRequest) -> Objects:
    folder: Path = request.getfixturevalue("tmp_path")
    return DiskObjects(folder / "objects", 64 * MIB, sync=False)


def mooncake(request: pytest.FixtureRequest) -> Objects:
    """The adapter; the store object is one of our own, with the codes of the real one."""
    return MooncakeObjects(library=fake(FakeStore()))


STORES: dict[str, Callable[[pytest.FixtureRequest], Objects]] = {
    "memory": memory,
    "disk": disk,
    "mooncake": mooncake,
}
"""What opens an empty store, by name. All that stores share is tested for each."""


def random_array(seed: int, dtype: str, shape: tuple[int, ...]) -> NDArray:
    """Any bits (NaNs, unused bits of short types) but for bool, whose bytes are 0 and 1."""
    rng, kind = np.random.default_rng(seed), DTYPES[dtype]
    raw = rng.integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8)
    return raw.reshape(-1).view(kind).reshape(shape)


def assert_same(got: Mapping[str, NDArray], expected: Mapping[str, NDArray]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


def item(key: str, data: bytes, group: str | None = None) -> Item:
    """An object of these bytes."""
    return Item(key, [np.frombuffer(data, np.uint8)], group)


def content(key: str, nbytes: int) -> bytes:
    """Bytes that follow from a key."""
    return np.random.default_rng(list(key.encode())).bytes(nbytes)


def read(objects: Objects, key: str) -> bytes | None:
    """A whole object."""
    [raw] = objects.get([Read(key)], TIMEOUT)
    return None if raw is None else raw.tobytes()


def replace(objects: Objects, key: str, data: bytes, group: str | None) -> None:
    """Puts other bytes in an object's place; none leaves it away."""
    assert objects.remove([key], TIMEOUT) == [True]
    if data:
        assert objects.put([item(key, data, group)], TIMEOUT) == [Put.STORED]


def edited(manifest: bytes, edit: Callable[[Any], Any]) -> bytes:
    """A manifest with another content, and the digest of that.

    `edit` changes the JSON value in place and returns None, or returns another one.
    """
    value = json.loads(manifest[BODY:])
    other = edit(value)
    return signed(json.dumps(value if other is None else other).encode())


class Watched:
    """An `Objects` over another one, that notes each call and may fail or wait in between."""

    def __init__(self, inner: Objects) -> None:
        self.inner = inner
        self.calls: list[tuple[str, list[Any]]] = []
        self.before: Callable[[str, list[Any]], None] = lambda operation, what: None
        self.fails: dict[str, Any] = {}

    def _call(self, operation: str, what: Sequence[Any], timeout: float, name: Callable[[Any], str]) -> Any:
        self.calls.append((operation, list(what)))
        self.before(operation, list(what))
        done = getattr(self.inner, operation)([one for one in what if name(one) not in self.fails], timeout)
        rest = iter(done)
        return [self.fails[name(one)] if name(one) in self.fails else next(rest) for one in what]

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        return self._call("put", items, timeout, lambda one: f"put {one.key}")

    def get(self, reads: Sequence[Read], timeout: float) -> list[Bytes | None]:
        return self._call("get", reads, timeout, lambda one: f"get {one.key}")

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        return self._call("contains", keys, timeout, lambda one: f"contains {one}")

    def remove(self, keys: Sequence[str], timeout: float, force: bool = False) -> list[bool]:
        return self._call("remove", keys, timeout, lambda one: f"remove {one}")

    def counters(self) -> Counters:
        return self.inner.counters()

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def wait(seconds: float) -> Callable[[str, list[Any]], None]:
    """For `Watched.before`: every call takes longer."""
    return lambda operation, what: time.sleep(seconds)
