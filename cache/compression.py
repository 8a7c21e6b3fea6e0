"""Recurrent states in a quarter of their bytes, where they wait: int8 with a scale a head and key channel.

A state is quantised once, on its way to the first tier that wants it smaller. From there on its bytes are copied as
they are, to slower and to faster tiers, and every request that resumes from it gets an expanded state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cache.payload import Payload
from cache.tiers import STATE, Storage

VALUES, SCALES = ".int8", ".scales"
"""Ends of the names of the two leaves that a compressed leaf becomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Which leaves of a checkpoint's state are compressed, and how. What resumes from them is no longer bit-exact: the
    namespace has to say so (`state_dtype="int8"`).

    Attributes:
        leaves: their names; all others are kept as they are.
        compress: a leaf, float32 `[..., H, K, V]`, to values, int8 of its shape, and scales, float32 `[..., H, K]`.
        expand: values and scales to a new array, float32 `[..., H, K, V]`.
    """

    leaves: frozenset[str]
    compress: Callable[[Any], tuple[Any, Any]]
    expand: Callable[[Any, Any], Any]

    def compressed(self, state: Payload) -> Payload:
        """A state with each of its leaves small; one that is compressed already stays what it is.

        Raises:
            ValueError: if a leaf is neither there nor compressed.
        """
        arrays = dict(_arrays(state))
        for leaf in sorted(self.leaves):
            if leaf in arrays:
                arrays[leaf + VALUES], arrays[leaf + SCALES] = self.compress(arrays.pop(leaf))
            elif leaf + VALUES not in arrays or leaf + SCALES not in arrays:
                raise ValueError(
                    f"a state without a leaf {leaf!r} to compress, it has {sorted(arrays)}; name leaves that it has"
                )
        return arrays

    def expanded(self, state: Payload) -> Payload:
        """A state with all leaves as they were put, in new arrays where they were compressed."""
        arrays = dict(_arrays(state))
        for leaf in sorted(self.leaves):
            if leaf + VALUES in arrays:
                arrays[leaf] = self.expand(arrays.pop(leaf + VALUES), arrays.pop(leaf + SCALES))
        return arrays


class Compressing:
    """Storage of a tier that keeps states compressed and everything else as it comes."""

    def __init__(self, storage: Storage, compression: Compression) -> None:
        self._storage, self._compression = storage, compression

    def write(self, name: str, payload: Payload) -> Payload:
        """Writes a payload, compressed if it is a state and is not yet."""
        return self._storage.write(
            name, self._compression.compressed(payload) if name.startswith(STATE) else payload
        )

    def read(self, name: str, kept: Payload | None) -> Payload:
        """What was written: copies between tiers keep its bytes, `load` expands it."""
        return self._storage.read(name, kept)


def _arrays(state: Payload) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise ValueError(f"only named arrays can be compressed, got {type(state).__name__}")
    return state
