"""The store: checkpoints by prompt, in tiers with budgets, as one immutable value.

Every change returns a new store and leaves the old one as it was, so that a reader needs no lock, and what fails
halfway has changed nothing. No I/O and no clock: times are handed in, and `cache.tiers` moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from immutables import Map
from numpy.typing import ArrayLike

from cache.contents import Contents
from cache.errors import Conflict
from cache.payload import Payload, same
from cache.plan import Limits, ResumePlan, resume
from cache.prompts import Prompts
from cache.retention.protocol import Kind, Policy
from cache.shelf import Shelf
from cache.stats import Counts, Stats, TierStats
from cache.tier import Tier
from cache.tokens import Media, as_tokens
from cache.view import Prompt, View, merge, view


class Store(Contents):
    """What is remembered of prompts, and what each tier holds of them; make one with `Store.empty`."""

    __slots__ = ()

    @classmethod
    def empty(
        cls,
        budgets: Mapping[Tier, int],
        policy: Policy,
        *,
        state_nbytes: int,
        row_nbytes: int,
        page: int = 512,
        share: float = 0.5,
    ) -> Store:
        """A store without a checkpoint.

        Args:
            budgets: bytes of each tier there is.
            policy: an empty one; each tier starts with it.
            state_nbytes: bytes of a checkpoint's state, as a policy is to weigh it; payloads say their own.
            row_nbytes: bytes of a token's latent, likewise.
            page: latent rows a page: what is moved and dropped together.
            share: largest part of a tier's budget that one prompt's latents and state may take. A larger prompt is
                served and not kept, so that it cannot flush what others use.

        Raises:
            ValueError: without a tier, and for values out of range.
        """
        if not budgets or page < 1 or not 0 < share <= 1:
            raise ValueError(
                f"a store has a tier, a positive {page=} and a {share=} in (0, 1], got {budgets=}"
            )
        return cls(
            state_nbytes=state_nbytes,
            row_nbytes=row_nbytes,
            share=share,
            prompts=Prompts.empty(page),
            shelves=Map({tier: Shelf.empty(budget, policy) for tier, budget in budgets.items()}),
            pinned=Map(),
            counts=Counts(),
        )

    def match(self, namespace: bytes, tokens: ArrayLike, media: Sequence[Media] = ()) -> View:
        """What is held of a prompt, and where. Changes nothing: `used` records that a request came."""
        index, folded, match = self.prompts.find(namespace, as_tokens(tokens), media)
        prompt = Prompt(namespace, match.data) if match.data and not media else None
        return view(index, folded, match, prompt)

    def plan(self, seen: View, num_tokens: int, limits: Limits, remote: View | None = None) -> ResumePlan:
        """Where a request resumes, from its `match` and what a remote store was found to hold of it."""
        return resume(merge(seen, remote) if remote else seen, num_tokens, self.prompts.page, limits)

    def used(self, seen: View, hit: bytes | None, now: float) -> Store:
        """A request came: `seen` is its match, `hit` the key of the boundary that it resumes from, if any.

        Only the boundary that it resumes from, or else the deepest one that it passes, counts as used.
        """
        places = self.prompts.places
        path = tuple([item.key for item in seen.boundaries if item.key is not None and item.key in places])
        hit = hit if hit in path else None
        key, prompts = hit or (path[-1] if path else None), self.prompts
        if key is not None:
            prompts = prompts.set_index(key, prompts.index(key).touch(prompts.places[key].node, now))
        return self._tell(prompts, lambda policy: policy.used(path, hit, now))

    def put(
        self,
        namespace: bytes,
        tokens: ArrayLike,
        state: Payload,
        pages: Sequence[Payload] = (),
        *,
        kind: Kind,
        now: float,
        media: Sequence[Media] = (),
        tier: Tier = Tier.DEVICE,
        exact: bool = True,
        seen: View | None = None,
    ) -> Store:
        """Publishes the checkpoint behind `tokens`, whole.

        Its latents are pages of `page` rows; the rows of an unfinished last page are among the leaves of `state`. If
        the budget does not suffice, the policy gives others up, or this one.

        Args:
            namespace: `Namespace.digest()`.
            tokens: all tokens before the boundary.
            state: what is at the boundary: the arrays pass to the store and are not written any more.
            pages: the last pages before the boundary, at least those that the tier does not hold; of those that it
                holds, its own stay.
            kind: why the boundary was made.
            now: seconds.
            media: those in `tokens`.
            tier: that holds the bytes.
            exact: whether other bytes for a boundary that the tier holds are an error. False in a namespace whose
                states are compressed, where what requests resume to differs a little: what is held stays.
            seen: the match of a prompt that begins with `tokens`, if there is one: what it names is not hashed again.

        Returns:
            A store that remembers the boundary and, where there was room, holds it. Nothing changes if the tier holds
            it already.

        Raises:
            Conflict: if the tier holds other bytes for this boundary.
            ValueError: if pages are missing, or there is no such tier.
        """
        shelf = self._shelf(tier)
        store, key = self._remember(namespace, tokens, media, kind, now, seen)
        if key in shelf.states:
            if exact and not same(shelf.states[key], state):
                raise Conflict(key, tier)
            return self
        lacks = store.prompts.lacks(key, tier)
        if len(pages) < len(lacks):
            raise ValueError(
                f"{len(lacks)} pages before the boundary are not held here, got {len(pages)}: pass them all"
            )
        return store._add(key, tier, state, lacks, pages[len(pages) - len(lacks) :], now)

    def remember(
        self, namespace: bytes, tokens: ArrayLike, *, kind: Kind, now: float, media: Sequence[Media] = ()
    ) -> Store:
        """Remembers the boundary behind `tokens` without bytes: a prompt that passes it again finds it missing."""
        return self._remember(namespace, tokens, media, kind, now)[0]

    def copied(
        self, key: bytes, tier: Tier, state: Payload, pages: Mapping[bytes, Payload], now: float
    ) -> Store:
        """Publishes a copy of a remembered boundary in another tier, where all of it has been written.

        Nothing changes if the boundary was forgotten meanwhile, if the tier holds it, or if pages that it lacks by now
        are not among `pages`.
        """
        if key not in self.prompts.places or key in self._shelf(tier).states:
            return self
        lacks = self.prompts.lacks(key, tier)
        if not all(name in pages for name in lacks):
            return self
        return self._add(key, tier, state, lacks, [pages[name] for name in lacks], now)

    def drop(self, key: bytes, tier: Tier, now: float) -> Store:
        """A tier gives up a checkpoint, and with it the pages that none of its other checkpoints and no pin needs.

        The boundary stays remembered. Nothing changes if the tier does not hold it or it is pinned.
        """
        return self._give_up(key, tier, now)

    def lose(self, key: bytes, tier: Tier, now: float, page: bytes | None = None) -> Store:
        """A checkpoint could not be read, or one of the pages before it: it goes, pinned or not, and so does every
        checkpoint of the tier that needs the page.

        Args:
            key: of the boundary. Nothing changes if it was forgotten meanwhile.
            tier: that failed. Nothing changes if the store keeps no account of it.
            now: seconds.
            page: name of the page that could not be read; None if it was the state.
        """
        if key not in self.prompts.places or tier not in self.shelves:
            return self
        if page is None:
            return self._release(key, tier, now)._count(lost=1) if key in self.shelves[tier].states else self
        index = self.prompts.index(key)
        owners = (at for at, node in index.ancestors(self.prompts.places[key].node) if page in node.names)
        index, keys, pages = index.strip(next(owners), tier)
        shelf = self.shelves[tier]
        for lost in keys:
            shelf = shelf.discard(lost, (), now)
        store = self._changed(key, index, tier, shelf.discard_pages(pages))
        return store._count(lost=len(keys))

    def evict(self, tier: Tier, num_bytes: int, now: float) -> Store:
        """A tier gives up what is worth least until `num_bytes` more are free or all that is left is pinned."""
        return self._evict(self.victims(tier, num_bytes, now), tier, num_bytes, now)

    def victims(self, tier: Tier, num_bytes: int, now: float) -> Iterator[bytes]:
        """What a tier would give up for so many bytes, in order; pinned ones, which it keeps, are among them.

        Copies of what a faster tier holds too go first, since dropping them loses nothing: a promotion does not take
        a slower tier's room from others. Its policy orders the rest.
        """
        return self._victims(tier, self._shelf(tier).policy, num_bytes, now)

    def pin(self, key: bytes) -> Store:
        """A boundary, and the pages before it, stay in the tiers where they are. Pins are counted.

        Raises:
            KeyError: if the boundary is not remembered.
        """
        index = self.prompts.index(key).pin(self.prompts.places[key].node)
        pinned = self.pinned.set(key, self.pinned.get(key, 0) + 1)
        return self._with(prompts=self.prompts.set_index(key, index), pinned=pinned)

    def unpin(self, key: bytes) -> Store:
        """Gives one pin back, and with the last one the pages that only it had kept.

        Raises:
            ValueError: if there is none.
        """
        if key not in self.pinned:
            raise ValueError(f"{key.hex()[:16]} is unpinned more often than pinned; a pin is given back once")
        index, freed = self.prompts.index(key).unpin(self.prompts.places[key].node)
        left = self.pinned[key] - 1
        pinned = self.pinned.set(key, left) if left else self.pinned.delete(key)
        store = self._with(prompts=self.prompts.set_index(key, index), pinned=pinned)
        for tier, names in freed:
            store = store._changed(key, index, tier, store.shelves[tier].discard_pages(names))
        return store

    def forget(self, most: int) -> Store:
        """Remembers at most `most` boundaries without bytes or pins: those that were used last."""
        nodes = ((key, self.prompts.node(key)) for key in self.prompts.places)
        idle = sorted((node.last_use, key) for key, node in nodes if not node.states and not node.pins)
        store = self
        for _, key in idle[: max(0, len(idle) - most)]:
            store = store._forget(key)
        return store

    def stats(self) -> Stats:
        """The store in numbers."""
        tiers = {
            tier: TierStats(len(shelf.states), len(shelf.pages), shelf.nbytes, shelf.budget)
            for tier, shelf in sorted(self.shelves.items())
        }
        return Stats(tiers, len(self.prompts.places), len(self.pinned), self.counts)
