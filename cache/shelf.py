"""The bytes that one tier holds, within its budget."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from immutables import Map

from cache.payload import Payload, nbytes
from cache.retention.protocol import Policy


class Shelf(NamedTuple):
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

    def with_policy(self, policy: Policy) -> Shelf:
        """With another policy value."""
        return self if policy is self.policy else self._with(policy, self.states, self.pages, self.nbytes)

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
        return self._with(
            self.policy.held(key, now) if policy is None else policy,
            self.states.set(key, state),
            self.pages.update(pages) if pages else self.pages,
            self.nbytes + size,
        )

    def discard(self, key: bytes, pages: Collection[bytes], now: float) -> Shelf:
        """Without a checkpoint and without these pages."""
        states, size = self.states.delete(key), nbytes(self.states[key])
        shelf = self._with(self.policy.dropped(key, now), states, self.pages, self.nbytes - size)
        return shelf.discard_pages(pages) if pages else shelf

    def discard_pages(self, pages: Iterable[bytes]) -> Shelf:
        """Without these pages."""
        left, size = self.pages.mutate(), 0
        for name in pages:
            size += nbytes(left.pop(name))
        return self._with(self.policy, self.states, left.finish(), self.nbytes - size)

    def _with(
        self, policy: Policy, states: Map[bytes, Payload], pages: Map[bytes, Payload], nbytes: int
    ) -> Shelf:
        return Shelf(self.budget, policy, states, pages, nbytes)
