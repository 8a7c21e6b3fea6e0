"""What a store keeps without looking inside: named arrays, or anything that says how many bytes it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np


@runtime_checkable
class Bytes(Protocol):
    """Anything with a size: an array, page numbers of a pool, the place of an object on disk."""

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        ...


Payload: TypeAlias = Mapping[str, Any] | Bytes
"""Immutable: named arrays, or one object with `nbytes` whose `==` compares contents."""


class Sized(NamedTuple):
    """A payload of a size and without contents, to replay traces with."""

    nbytes: int


def nbytes(payload: Payload) -> int:
    """Bytes of a payload.

    Raises:
        TypeError: for what is none.
    """
    size = getattr(payload, "nbytes", None)
    if size is not None:
        return int(size)
    if not isinstance(payload, Mapping):
        raise TypeError(f"a payload is named arrays or has nbytes, got {type(payload).__name__}")
    return sum(int(array.nbytes) for array in payload.values())


def same(a: Payload, b: Payload) -> bool:
    """Whether two payloads have the same bytes: names, dtypes, shapes and contents, where NaNs equal their own bits."""
    if a is b:
        return True
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return bool(a == b)
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
