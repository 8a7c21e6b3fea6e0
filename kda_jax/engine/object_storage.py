"""A tier of the cache whose bytes are objects of a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cache import Payload
from transfer import About, Objects, Put, fetch, fetch_all, publish
from transfer.counters import Counters, Recorder


class Stored(NamedTuple):
    """Stands in the cache for a payload in a store of objects, and says how many bytes it has there."""

    nbytes: int


class OtherBytes(OSError):
    """The store holds other bytes under a name: another process computed the same tokens, and rounded differently."""


class ObjectStorage:
    """A `cache.Storage`: each payload, a state or a page of latents, is a checkpoint of the object store by its name.

    What it writes stays in the store, which others may share, until the store gives it up for its own reasons.
    """

    def __init__(self, objects: Objects, namespace: bytes, timeout: float) -> None:
        """
        Args:
            objects: open; whoever opened it closes it.
            namespace: `cache.Namespace.digest()`; what another namespace wrote is not read.
            timeout: seconds that one payload may take.
        """
        self.objects, self.timeout, self._namespace = objects, timeout, namespace.hex()
        self._recorder = Recorder()

    def write(self, name: str, payload: Payload) -> Stored:
        """Publishes named arrays.

        Raises:
            OtherBytes: if the store holds other ones under the name; they stay.
            OSError: if it does not hold them in time.
            ValueError: for a payload without arrays.
        """
        if not isinstance(payload, Mapping):
            raise ValueError(f"{name}: only named arrays can be stored, got {type(payload).__name__}")
        arrays = {leaf: np.asarray(array) for leaf, array in payload.items()}
        position = next((array for leaf, array in arrays.items() if leaf.endswith(".position")), None)
        about = About(self._namespace, 0 if position is None else int(position[0]))
        put = publish(self.objects, name, arrays, about, self.timeout, recorder=self._recorder)
        if put is Put.CONFLICT:
            raise OtherBytes(f"{name} was not stored (conflict): the store holds other bytes")
        if not put.there:
            raise OSError(f"{name} was not stored ({put.value})")
        return Stored(sum(array.nbytes for array in arrays.values()))

    def read(
        self, name: str, kept: Payload | None = None, leaves: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """The arrays of a name, read-only, in memory of their own; with `leaves` these and no others.

        Raises:
            OSError: if they are not there, or not whole, or not read in time.
        """
        found = fetch(self.objects, name, self._namespace, leaves, self.timeout, self._recorder)
        if found is None:
            raise OSError(f"{name} is not in the store, or not whole")
        return found.arrays

    def read_all(self, names: Sequence[str]) -> list[dict[str, np.ndarray] | None]:
        """The arrays of each name as `read` gives them, in two calls of the store however many; None for a miss."""
        if not names:
            return []
        found = fetch_all(self.objects, names, self._namespace, self.timeout, self._recorder)
        return [None if each is None else each.arrays for each in found]

    def counters(self) -> Counters:
        """How many payloads were written and read, and why others were not (`transfer.Miss`)."""
        return self._recorder.snapshot()
