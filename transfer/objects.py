"""Objects by name in memory, on disk or in another process: what every store of them can do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transfer.counters import Counters

Bytes: TypeAlias = NDArray[np.uint8]
"""C-contiguous bytes, [nbytes]."""


class Item(NamedTuple):
    """One object to store: a name, and its bytes as pieces that follow each other without gaps.

    Attributes:
        key: name, at most 512 characters of letters, digits and `._-/`. A key names one value for ever.
        pieces: in order. They are not changed before the call that got them has ended, nor after it if it ended with
            `Put.LATE`.
        group: objects of one group are evicted together where a store can do that; None for a group of its own.
    """

    key: str
    pieces: Sequence[Bytes]
    group: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class Read(NamedTuple):
    """What to read of one object: bytes [start, start + nbytes), or from `start` to its end if `nbytes` is None."""

    key: str
    start: int = 0
    nbytes: int | None = None


class Put(Enum):
    """How a put of one object ended."""

    STORED = "stored"
    """It is there, with a size that was verified."""
    HELD = "held"
    """An object of this name and size was there before; it was left as it was."""
    CONFLICT = "conflict"
    """An object of this name and of another size was there before; it was left as it was."""
    FULL = "full"
    """No room, also after the retries that the deadline allowed. Nothing is stored."""
    FAILED = "failed"
    """The store refused, was not there, or had lost it when it was verified."""
    LATE = "late"
    """The deadline passed first. It may be stored or not."""

    @property
    def there(self) -> bool:
        """Whether the object can be read now, as far as is known."""
        return self in (Put.STORED, Put.HELD)


class Objects(Protocol):
    """A store of immutable objects by name. Every call is a batch, ends by its deadline and may come from any thread.

    No call raises for what a store does or fails to do: a miss is None or False, and `counters` says why. What raises
    is wrong use (`ValueError`: a bad key, an empty object, a timeout that is not positive) and use after `close`
    (`Closed`).
    """

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        """Stores each object, or leaves an older one of its name as it was. Objects have at least one byte.

        Args:
            items: distinct keys.
            timeout: seconds until the call has ended.
        """
        ...

    def get(self, reads: Sequence[Read], timeout: float) -> list[Bytes | None]:
        """Reads each object, or a part of it, into memory that is the caller's alone; None for a miss.

        A part that reaches beyond the object's end is a miss, never a shorter part.
        """
        ...

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """Whether each object was there a moment ago. Ask about few: some stores keep what was asked about."""
        ...

    def remove(self, keys: Sequence[str], timeout: float, force: bool = False) -> list[bool]:
        """Removes each object; whether it is gone now (also if it never was there).

        Args:
            force: also what is being read, where a store protects that. Its readers may get other bytes then, so it is
                for what is damaged.
        """
        ...

    def counters(self) -> Counters:
        """What was done so far."""
        ...

    def close(self) -> None:
        """Waits for calls that still run, as far as they end, and gives all back. A second close does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any: ...
