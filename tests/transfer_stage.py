"""The child of `transfer_actor.Actor`: a store, and what it is told to do with it; a line of JSON a call, one a reply.

Contents are made from seeds and compared by digest, so no bytes pass between the two.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from transfer import About, Item, MemoryObjects, Objects, Put, Read, Recorder, fetch, publish, withdraw
from transfer.dtypes import DTYPES
from transfer.mooncake import MooncakeObjects, MooncakeSettings

NAMESPACE = "actors"
T = TypeVar("T")


def contents(seed: int, nbytes: int) -> dict[str, NDArray]:
    """A checkpoint's arrays, about `nbytes` together: half in one leaf, the rest in small ones, one of them empty."""
    rng = np.random.Generator(np.random.SFC64(seed))
    count = nbytes // 64
    return {
        "latent": rng.integers(256, size=count * 32, dtype=np.uint8),
        "layers.0.recurrent": rng.standard_normal((count, 4), np.float32),
        "layers.1.recurrent": rng.standard_normal((count, 2), np.float32),
        "layers.1.conv": rng.integers(1 << 16, size=(count, 4), dtype=np.uint16).view(DTYPES["bfloat16"]),
        "empty": np.zeros((0, 3), np.float32),
    }


def every_dtype(seed: int) -> dict[str, NDArray]:
    """An array of every dtype that a checkpoint may hold, of all bit patterns, and the odd shapes."""
    rng = np.random.Generator(np.random.SFC64(seed))
    patterns = {
        name: rng.integers(2 if name == "bool" else 256, size=(3, 7 * dtype.itemsize), dtype=np.uint8).view(
            dtype
        )
        for name, dtype in DTYPES.items()
    }
    whole = rng.standard_normal((6, 8), np.float32)
    return patterns | {
        "scalar": np.full((), seed, np.float32),
        "none": whole[:0],
        "strided": whole[::2, 1::3],
    }


def digest(arrays: Mapping[str, NDArray]) -> str:
    """Of all names, dtypes, shapes and bytes."""
    said = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        said.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        said.update(np.ascontiguousarray(array).tobytes())
    return said.hexdigest()


def raw_bytes(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """An object's bytes."""
    return np.random.Generator(np.random.SFC64(seed)).integers(256, size=nbytes, dtype=np.uint8)


class Suicide:
    """An `Objects` whose process is killed before or after one of its calls of `put`, or some time after its start."""

    def __init__(self, objects: Objects, put_call: int, when: str | float) -> None:
        self._objects, self._left, self._when = objects, put_call, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        self._left -= 1
        if self._left == 0 and self._when == "before":
            _die()
        if self._left == 0 and not isinstance(self._when, str):
            threading.Timer(self._when, _die).start()
        puts = self._objects.put(items, timeout)
        if self._left == 0 and self._when == "after":
            _die()
        return puts


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Stage:
    """The child's calls, by name. What they spend in the store is timed, not the making and digesting of contents."""

    objects: Objects

    def __init__(self) -> None:
        self.spent = threading.local()

    def timed(self, call: Callable[..., T], *arguments: Any) -> T:
        """The store's part of a call."""
        start = monotonic()
        try:
            return call(*arguments)
        finally:
            self.spent.seconds = monotonic() - start

    def open(self, store: str, settings: dict[str, Any]) -> None:
        """Opens the store."""
        self.objects = STORES[store](**settings)

    def put(self, seeds: dict[str, int], nbytes: int, timeout: float) -> list[str]:
        """Stores objects of `nbytes` by name."""
        items = [Item(key, [raw_bytes(seed, nbytes)]) for key, seed in seeds.items()]
        return [put.value for put in self.timed(self.objects.put, items, timeout)]

    def put_raw(self, key: str, raw: str, timeout: float) -> str:
        """Stores one object of bytes in hex."""
        items = [Item(key, [np.frombuffer(bytes.fromhex(raw), np.uint8)])]
        return self.timed(self.objects.put, items, timeout)[0].value

    def get(self, keys: list[str], timeout: float) -> list[str | None]:
        """Reads objects; their bytes' digests."""
        found = self.timed(self.objects.get, [Read(key) for key in keys], timeout)
        return [None if raw is None else hashlib.sha256(raw.tobytes()).hexdigest() for raw in found]

    def contains(self, keys: list[str], timeout: float) -> list[bool]:
        """See `Objects`."""
        return self.timed(self.objects.contains, keys, timeout)

    def remove(self, keys: list[str], timeout: float) -> list[bool]:
        """See `Objects`."""
        return self.timed(self.objects.remove, keys, timeout)

    def publish(
        self,
        name: str,
        seed: int,
        timeout: float,
        nbytes: int = 1 << 16,
        part_nbytes: int = 1 << 14,
        namespace: str = NAMESPACE,
        dtypes: bool = False,
        die: tuple[int, str | float] | None = None,
    ) -> str:
        """Publishes `contents`, or `every_dtype`; `die` is what `Suicide` wants."""
        objects = Suicide(self.objects, *die) if die else self.objects
        arrays = every_dtype(seed) if dtypes else contents(seed, nbytes)
        about = About(namespace, boundary=seed)
        return self.timed(publish, objects, name, arrays, about, timeout, part_nbytes).value

    def fetch(
        self, name: str, timeout: float, namespace: str = NAMESPACE, leaves: list[str] | None = None
    ) -> tuple[str | None, str]:
        """Fetches; the arrays' digest, and how it ended."""
        recorder = Recorder()
        found = self.timed(fetch, self.objects, name, namespace, leaves, timeout, recorder)
        ((_, outcome),) = recorder.snapshot().operations
        return found and digest(found.arrays), outcome

    def withdraw(self, name: str, timeout: float) -> bool:
        """Withdraws."""
        return self.timed(withdraw, self.objects, name, timeout)

    def replace(self, key: str, how: str, timeout: float) -> None:
        """Takes an object away, and stores it again short by a byte or with a bit flipped, unless `how` is removed."""
        (raw,) = self.objects.get([Read(key)], timeout)
        assert raw is not None and self.objects.remove([key], timeout, force=True) == [True]
        if how == "truncated":
            raw = raw[:-1]
        if how == "flipped":
            raw[len(raw) // 2] ^= 4
        if how != "removed":
            (put,) = self.objects.put([Item(key, [raw])], timeout)
            assert put is Put.STORED, put

    def outcomes(self) -> dict[str, int]:
        """How many objects' operations ended how, as "operation outcome", and other counts."""
        now = self.objects.counters()
        counts = {" ".join(of): operation.objects for of, operation in now.operations.items()}
        return counts | {"retries": now.retries, "dropped": now.dropped, "opened": now.opened}

    def peak_nbytes(self) -> int:
        """The most memory that the process ever had."""
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    def close(self) -> None:
        """Closes the store."""
        self.timed(self.objects.close)


STORES: dict[str, Callable[..., Objects]] = {
    "memory": MemoryObjects,
    "mooncake": lambda **settings: MooncakeObjects(MooncakeSettings(**settings)),
}


def act() -> None:
    """The child: every call in a thread of its own, until there are no more lines; then closes the store."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no reply
    stage, lock = Stage(), threading.Lock()

    def run(number: int, call: str, **arguments: Any) -> None:
        value, raised = None, None
        try:
            value = getattr(stage, call)(**arguments)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        reply = {
            "number": number,
            "value": value,
            "raised": raised,
            "seconds": getattr(stage.spent, "seconds", 0.0),
        }
        with lock:
            print(json.dumps(reply), file=replies)

    for line in sys.stdin:
        threading.Thread(target=run, kwargs=json.loads(line), daemon=True).start()
    stage.close()


if __name__ == "__main__":
    faulthandler.enable()
    act()
