"""One instance that serves prompts through a store, for tests that count tokens and need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache.namespace import Namespace
from cache.payload import Sized
from cache.placement import Placed, place
from cache.plan import Limits, ResumePlan
from cache.retention.protocol import Creation, Kind
from cache.store import Store
from cache.tier import Tier
from cache.tokens import Media, Tokens
from cache.view import View
from oldest_first import OldestFirst

NAMESPACE = Namespace(weights=b"weights", tokenizer=b"tokenizer").digest()
STATE, ROW = 1000, 1
"""Bytes of a state and of a token's latent."""


def text(num_tokens: int, seed: int = 0) -> Tokens:
    """Token ids that no other seed shares a first one with."""
    tokens = np.random.default_rng(seed).integers(0, 2**20, num_tokens, np.int32)
    tokens[:1] = 2**20 + seed
    return tokens


def join(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


class Site:
    """Serves prompts one after another. Its clock counts them."""

    def __init__(
        self, *, grid: int = 64, page: int = 64, budgets: dict[Tier, int] | None = None, share: float = 1.0
    ) -> None:
        self.limits, self.page, self.now = Limits(grid=grid), page, 0.0
        budgets = budgets or {Tier.DEVICE: 10**9}
        self.store = Store.empty(
            budgets, OldestFirst(), state_nbytes=STATE, row_nbytes=ROW, page=page, share=share
        )

    def plan(
        self,
        tokens: Tokens,
        *,
        namespace: bytes = NAMESPACE,
        media: Sequence[Media] = (),
        remote: View | None = None,
    ) -> ResumePlan:
        seen = self.store.match(namespace, tokens, media)
        return self.store.plan(seen, len(tokens), self.limits, remote)

    def serve(
        self,
        tokens: Tokens,
        *,
        namespace: bytes = NAMESPACE,
        media: Sequence[Media] = (),
        remote: View | None = None,
        creation: Creation = Creation(),  # noqa: B008
        marks: Sequence[int] = (),
        reach: int | None = None,
    ) -> tuple[int, tuple[Placed, ...]]:
        """A prefill that puts what was planned, up to `reach` if it is aborted there.

        Returns:
            Where it resumed, and what it made.
        """
        self.now += 1
        plan = self.plan(tokens, namespace=namespace, media=media, remote=remote)
        seen = self.store.match(namespace, tokens, media)
        self.store = self.store.used(seen, plan.key, self.now)
        made = place(plan, len(tokens), self.limits, creation, marks)
        made = made if reach is None else tuple(placed for placed in made if placed.boundary <= reach)
        for boundary, kind in made:
            self.put(tokens[:boundary], namespace=namespace, media=media, kind=kind)
        return plan.boundary, made

    def put(
        self,
        tokens: Tokens,
        *,
        namespace: bytes = NAMESPACE,
        media: Sequence[Media] = (),
        kind: Kind = Kind.PROMPT_END,
        tier: Tier = Tier.DEVICE,
    ) -> bytes:
        """The checkpoint behind all tokens; its key."""
        self.now += 1
        media = [item for item in media if item.position < len(tokens)]
        pages = [Sized(self.page * ROW)] * (len(tokens) // self.page)
        self.store = self.store.put(
            namespace, tokens, Sized(STATE), pages, kind=kind, now=self.now, media=media, tier=tier
        )
        last = self.store.match(namespace, tokens, media).boundaries[-1]
        assert last.boundary == len(tokens) and last.key is not None
        return last.key
