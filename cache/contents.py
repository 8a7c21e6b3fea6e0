"""What a store holds, as one immutable value, and the steps that its changes are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Self, TypeVar

from immutables import Map
from numpy.typing import ArrayLike

from cache.index import Index
from cache.payload import Payload, nbytes
from cache.prompts import Prompts
from cache.retention.protocol import Boundary, Kind, Policy
from cache.shelf import Shelf
from cache.stats import Counts
from cache.tier import Tier
from cache.tokens import Media
from cache.view import View

T = TypeVar("T", bound="Contents")


class Contents(NamedTuple):
    """An immutable value; `Store` is one, and has what callers ask of it.

    Attributes:
        state_nbytes: what a policy is told of a checkpoint's state.
        row_nbytes: what a policy is told of a token's latent.
        share: largest part of a tier's budget that one prompt may take.
        prompts: every boundary that is remembered.
        shelves: what each tier holds.
        pinned: how many pins there are, by key.
        counts: what happened so far.
    """

    state_nbytes: int
    row_nbytes: int
    share: float
    prompts: Prompts
    shelves: Map[Tier, Shelf]
    pinned: Map[bytes, int]
    counts: Counts

    def _remember(
        self,
        namespace: bytes,
        tokens: ArrayLike,
        media: Sequence[Media],
        kind: Kind,
        now: float,
        seen: View | None = None,
    ) -> tuple[Self, bytes]:
        """A store that remembers a boundary, and its key."""
        prompts, key = self.prompts.remember(namespace, tokens, media, kind, now, seen)
        if prompts is self.prompts:
            return self, key
        place, index = prompts.places[key], prompts.index(key)
        around = index.parent(place.node), index.children(place.node)
        length = index.nodes[place.node].stop
        made = Boundary(key, length, *around, kind, place.turn, self.state_nbytes, self.row_nbytes)
        return self._tell(prompts, lambda policy: policy.made(made, now)), key

    def _forget(self, key: bytes) -> Self:
        return self._tell(self.prompts.forget(key), lambda policy: policy.forgotten(key))

    def _add(
        self,
        key: bytes,
        tier: Tier,
        state: Payload,
        names: Sequence[bytes],
        pages: Sequence[Payload],
        now: float,
    ) -> Self:
        """Holds a checkpoint and the pages that the tier lacks; gives up what is worth least if that is too much."""
        shelf, node, page = self.shelves[tier], self.prompts.places[key].node, self.prompts.page
        index, size = self.prompts.index(key), nbytes(state)
        rows = index.nodes[node].stop // page * page
        if size + self.row_nbytes * rows > self.share * shelf.budget:
            return self._count(skipped=1)
        policy, excess = shelf.policy.held(key, now), shelf.nbytes + size - shelf.budget
        if excess <= 0:  # else there is no room, whatever the pages take
            excess += sum(map(nbytes, pages))
        order = self._victims(tier, policy, excess, now, key) if excess > 0 else iter(())
        first = list(islice(order, 1))
        if first == [key] and key not in self.pinned:
            return self._count(skipped=1)
        shelf = shelf.add(key, state, dict(zip(names, pages)), now, policy)
        store = self._changed(key, index.hold(node, tier), tier, shelf)._count(puts=1)
        if shelf.excess:
            store = store._evict(chain(first, order), tier, shelf.excess, now)
        if store.shelves[tier].excess:
            store = store._give_up(key, tier, now)
        return store if key in store.shelves[tier].states else store._count(skipped=1)

    def _evict(self, victims: Iterable[bytes], tier: Tier, num_bytes: int, now: float) -> Self:
        """Gives up victims until `num_bytes` more are free, but none that turn out to be needless."""
        goal = max(0, self._shelf(tier).nbytes - num_bytes)
        versions, gone = [self], []
        for key in victims if self.shelves[tier].nbytes > goal else ():
            after = versions[-1]._give_up(key, tier, now)
            if after is versions[-1]:
                continue
            gone.append(key)
            versions.append(after)
            if after.shelves[tier].nbytes <= goal:
                break
        store, count = _sparing(versions, gone, goal, tier, now)
        return store._count(evicted=count) if count else store

    def _victims(
        self, tier: Tier, policy: Policy, num_bytes: int, now: float, new: bytes | None = None
    ) -> Iterator[bytes]:
        """`Store.victims` under a policy value; `new`, which is being copied here, counts as no copy yet."""
        faster = [shelf.states for other, shelf in self.shelves.items() if other < tier]
        if not faster:
            return policy.victims(num_bytes, now)
        held = self.shelves[tier].states
        copies = {key for states in faster for key in states if key in held and key != new}
        if not copies:
            return policy.victims(num_bytes, now)
        first = sorted(copies, key=lambda key: (self.prompts.node(key).last_use, key))
        return chain(first, (key for key in policy.victims(num_bytes, now) if key not in copies))

    def _give_up(self, key: bytes, tier: Tier, now: float) -> Self:
        """Without a checkpoint in a tier, if it is there and not pinned."""
        if key not in self._shelf(tier).states or key in self.pinned:
            return self
        return self._release(key, tier, now)

    def _release(self, key: bytes, tier: Tier, now: float) -> Self:
        """Without a checkpoint in a tier and the pages that nothing else in it needs."""
        index, freed = self.prompts.index(key).release(self.prompts.places[key].node, tier)
        return self._changed(key, index, tier, self.shelves[tier].discard(key, freed, now))

    def _changed(self, key: bytes, index: Index, tier: Tier, shelf: Shelf) -> Self:
        """With other versions of the index that a boundary lies in and of what a tier holds."""
        return self._with(prompts=self.prompts.set_index(key, index), shelves=self.shelves.set(tier, shelf))

    def _tell(self, prompts: Prompts, event: Callable[[Policy], Policy]) -> Self:
        """With other prompts, through an event of which every tier's policy hears."""
        shelves = {tier: shelf.with_policy(event(shelf.policy)) for tier, shelf in self.shelves.items()}
        return self._with(prompts=prompts, shelves=Map(shelves))

    def _shelf(self, tier: Tier) -> Shelf:
        if tier not in self.shelves:
            there = sorted(each.name.lower() for each in self.shelves)
            raise ValueError(f"there is no tier {tier.name.lower()} here, there is {there}: give it a budget")
        return self.shelves[tier]

    def _count(self, *, puts: int = 0, skipped: int = 0, evicted: int = 0, lost: int = 0) -> Self:
        was = self.counts
        counts = Counts(was.puts + puts, was.skipped + skipped, was.evicted + evicted, was.lost + lost)
        return self._with(counts=counts)

    def _with(
        self,
        *,
        prompts: Prompts | None = None,
        shelves: Map[Tier, Shelf] | None = None,
        pinned: Map[bytes, int] | None = None,
        counts: Counts | None = None,
    ) -> Self:
        """As `_replace`, and quicker: a request changes a store about ten times."""
        return type(self)(
            self.state_nbytes,
            self.row_nbytes,
            self.share,
            self.prompts if prompts is None else prompts,
            self.shelves if shelves is None else shelves,
            self.pinned if pinned is None else pinned,
            self.counts if counts is None else counts,
        )


def _sparing(versions: list[T], gone: list[bytes], goal: int, tier: Tier, now: float) -> tuple[T, int]:
    """Without what has to go for a tier to have at most `goal` bytes, and how many those are.

    Args:
        versions: before each of `gone` was given up, and after the last, without which there was too much.
        gone: in this order. All others are spared if there is room for them, those that are worth most first.
    """
    left = [version.shelves[tier].nbytes for version in versions]
    slack, spared = goal - left[-1], set()
    for at in range(len(gone) - 2, -1, -1):
        if left[at] - left[at + 1] <= slack:
            slack -= left[at] - left[at + 1]
            spared.add(at)
    if not spared:
        return versions[-1], len(gone)
    first = min(spared)
    store = versions[first]
    for at in range(first + 1, len(gone)):
        store = store if at in spared else store._give_up(gone[at], tier, now)
    if store.shelves[tier].nbytes > goal:  # pages that they share with what is gone would stay, too
        return versions[-1], len(gone)
    return store, len(gone) - len(spared)
