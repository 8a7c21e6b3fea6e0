"""Requests: what is asked for, and where each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from cache.placement import Placed
from cache.tier import ALL_TIERS
from cache.tokens import Tokens
from cache.view import View
from kda_jax.engine.lookup import Drafter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What is asked for.

    Attributes:
        id: its name, never used twice.
        namespace: `cache.Namespace.digest()`: whom it may share checkpoints with.
        tokens: the prompt, int32 [T].
        max_new_tokens: most tokens that it generates.
        priority: higher goes first; among equals, who came first.
        deadline: seconds on the caller's clock after which it is given up; None for never.
        remote: what a remote store was found to hold of the prompt.

    Raises:
        ValueError: without a token to compute or one to generate.
    """

    id: int
    namespace: bytes
    tokens: Tokens
    max_new_tokens: int
    priority: int = 0
    deadline: float | None = None
    remote: View | None = None

    def __post_init__(self) -> None:
        if not len(self.tokens) or self.max_new_tokens < 1:
            raise ValueError(
                f"a request computes and generates a token at least, got {len(self.tokens)} tokens and "
                f"{self.max_new_tokens=}"
            )


class Stage(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SAVING = "saving"
    """Its state is written to the cache; then it leaves, or waits if it was preempted."""


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


class Refused(ValueError):
    """The request can never be served: its tokens do not fit into the pool."""


class Overloaded(Exception):
    """Too many tokens wait already; the request is not taken. Come again later."""


@dataclass(slots=True, eq=False)
class Live:
    """A request in the scheduler's books.

    Attributes:
        request: what was asked for.
        arrival: its number in the order of arrival.
        tokens: the prompt and what was generated.
        stage: where it stands.
        attempt: how often it was started.
        slot: row of its state; None while it waits.
        table: its pages of latents, in order.
        computed: tokens that its state has taken in.
        stops: boundaries that its prefill makes checkpoints at.
        loaded: the boundary that it was loaded at, while the device tier does not hold that.
        saving: pages that its state is written to, while it is saved.
        pinned: key of the boundary that is pinned for it.
        tiers: set of those that it still trusts to load from.
        busy: whether work in flight names it: its pages and its slot may be written until that is over.
        outcome: how it ended, once it has.
        drafter: guesses how it goes on; None if nobody does.
    """

    request: Request
    arrival: int
    tokens: Tokens
    stage: Stage = Stage.WAITING
    attempt: int = 0
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    computed: int = 0
    stops: tuple[Placed, ...] = ()
    loaded: int | None = None
    saving: tuple[int, ...] = ()
    pinned: bytes | None = None
    tiers: int = ALL_TIERS
    busy: bool = False
    outcome: Outcome | None = None
    drafter: Drafter | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first."""
        return -self.request.priority, self.arrival

    @property
    def generated(self) -> int:
        """Tokens that it has generated so far."""
        return len(self.tokens) - len(self.request.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes generated tokens."""
        self.tokens = np.concatenate((self.tokens, np.array(tokens, np.int32)))
