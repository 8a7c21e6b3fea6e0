"""The bytes that one tier holds, within its budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from immutables import Map

from cache.payload import Payload, nbytes
from cache.retention.protocol import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """An immutable value: checkpoints and pages by name, each counted once.

    Attributes:
        budget: bytes that it may hold.
        policy: says what to give up first.
        states: recurrent and other fixed-size state of checkpoints, by the boundary's key.
        pages: latent rows, by the name of the page.
        nbytes: of all of these.
    """

    budget: int
    policy: Policy
    states: Map[bytes, Payload]
    pages: Map[bytes, Payload]
    nbytes: int

    @classmethod
    def empty(cls, budget: int, policy: Policy) -> Shelf:
        """Without bytes.

        Raises:
            ValueError: if `budget` is negative.
        """
        if budget < 0:
            raise ValueError(f"{budget=} bytes must not be negative")
        return cls(budget=budget, policy=policy, states=Map(), pages=Map(), nbytes=0)

    @property
    def excess(self) -> int:
        """Bytes beyond the budget."""
        return max(0, self.nbytes - self.budget)

    def add(
        self,
        key: bytes,
        state: Payload,
        pages: Mapping[bytes, Payload],
        now: float,
        policy: Policy | None = None,
    ) -> Shelf:
        """With a checkpoint and the pages that it did not have; `policy` is its own that knows of this, if one does."""
        size = nbytes(state) + sum(map(nbytes, pages.values()))
        return replace(
            self,
            policy=self.policy.held(key, now) if policy is None else policy,
            states=self.states.set(key, state),
            pages=self.pages.update(pages) if pages else self.pages,
            nbytes=self.nbytes + size,
        )

    def discard(self, key: bytes, pages: Iterable[bytes], now: float) -> Shelf:
        """Without a checkpoint and without these pages."""
        size = nbytes(self.states[key])
        shelf = replace(
            self,
            policy=self.policy.dropped(key, now),
            states=self.states.delete(key),
            nbytes=self.nbytes - size,
        )
        return shelf.discard_pages(pages)

    def discard_pages(self, pages: Iterable[bytes]) -> Shelf:
        """Without these pages."""
        left, size = self.pages.mutate(), 0
        for name in pages:
            size += nbytes(left.pop(name))
        return replace(self, pages=left.finish(), nbytes=self.nbytes - size)
