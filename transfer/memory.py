"""Objects in the memory of this process."""

from __future__ import annotations

from transfer.aligned import join
from transfer.local import Found, LocalObjects
from transfer.objects import Bytes, Item, Put, Read


class Memory:
    """A place: copies, by key."""

    def __init__(self) -> None:
        self._values: dict[str, Bytes] = {}

    def cost(self, key: str, nbytes: int, group: str | None) -> int:
        """See `Place`: its bytes."""
        return nbytes

    def write(self, item: Item, until: float) -> Put:
        """See `Place`. A deadline does not end a copy."""
        self._values[item.key] = join(item.pieces)
        return Put.STORED

    def read(self, read: Read, nbytes: int, until: float) -> Found:
        """See `Place`."""
        value = self._values.get(read.key)
        if value is None:
            return Found("absent")
        stop = value.nbytes if read.nbytes is None else read.start + read.nbytes
        return Found("hit", join([value[read.start : stop]]))

    def drop(self, key: str) -> None:
        """See `Place`."""
        self._values.pop(key, None)

    def damaged(self, key: str, nbytes: int) -> bool:
        """See `Place`."""
        return key not in self._values

    def close(self) -> None:
        """Forgets all."""
        self._values.clear()


class MemoryObjects(LocalObjects):
    """An `Objects` that holds copies."""

    def __init__(self, budget_nbytes: int | None = None) -> None:
        """`budget_nbytes` is the most bytes of all objects; None for no limit."""
        super().__init__(Memory(), budget_nbytes)
