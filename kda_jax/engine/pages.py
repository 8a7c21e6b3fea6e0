"""Pages of the pool and slots of running requests: which are given out, and to how many holders each."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence


class PoolPages:
    """Stands in the cache for what lies in pages of the pool. They go back when the last store lets go of it.

    Attributes:
        pages: their numbers, in order.
        nbytes: bytes of all of them.
    """

    def __init__(self, pages: tuple[int, ...], nbytes: int) -> None:
        self.pages, self.nbytes = pages, nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolPages) and self.pages == other.pages

    def __hash__(self) -> int:
        return hash(self.pages)


class Pages:
    """Gives out equal pages and counts who holds each: requests that read it, and payloads of the cache.

    Page 0 is never given out: padding writes there. One thread takes and gives back; payloads may be collected on any.
    """

    def __init__(self, num_pages: int, page_nbytes: int) -> None:
        """
        Raises:
            ValueError: without a page beside page 0, and for pages without bytes.
        """
        if num_pages < 2 or page_nbytes < 1:
            raise ValueError(
                f"a pool needs a page beside page 0, and bytes in it, got {num_pages=}, {page_nbytes=}"
            )
        self.num_pages, self.page_nbytes = num_pages, page_nbytes
        self.holders = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._collected: deque[tuple[int, ...]] = deque()

    @property
    def capacity(self) -> int:
        """Pages that can be given out in all."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        collected = [self._collected.popleft() for _ in range(len(self._collected))]
        for pages in sorted(collected):  # in an order that no hash decides
            self.give_back(pages)
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Pages with one holder, the caller; None, and no page taken, if fewer are free."""
        if count > self.free:
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self.share(pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One holder more."""
        for page in pages:
            self.holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less; a page without one is free.

        Raises:
            ValueError: for a page that nobody holds.
        """
        for page in pages:
            if not self.holders[page]:
                raise ValueError(f"page {page} is given back more often than taken")
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free.append(page)

    def payload(self, pages: Sequence[int]) -> PoolPages:
        """A holder more, that the cache may keep: it lets go when it is collected."""
        self.share(pages)
        payload = PoolPages(tuple(pages), len(pages) * self.page_nbytes)
        weakref.finalize(payload, self._collected.append, payload.pages).atexit = False
        return payload


class Slots:
    """Gives out rows for the states of running requests. Slot 0 is never given out: padding writes there."""

    def __init__(self, num_slots: int) -> None:
        """
        Raises:
            ValueError: without a slot beside slot 0.
        """
        if num_slots < 2:
            raise ValueError(f"{num_slots=}: a request needs a slot beside slot 0")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self) -> int | None:
        """A slot, or None if all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """
        Raises:
            ValueError: for a slot that nobody has.
        """
        if not 0 < slot < self.num_slots or slot in self._free:
            raise ValueError(f"slot {slot} is not taken")
        self._free.append(slot)
