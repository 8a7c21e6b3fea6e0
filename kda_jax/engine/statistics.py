"""An engine in numbers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cache.stats import TierStats

RECENT = 1024
"""Times that are kept one by one."""


class Times(NamedTuple):
    """Times of one kind, in seconds.

    Attributes:
        count: how many there were.
        total: their sum.
        recent: the last ones, oldest first.
    """

    count: int
    total: float
    recent: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """An engine at one moment; counts are since its start.

    Attributes:
        waiting: requests without a slot.
        waiting_tokens: tokens of these.
        loading: requests whose checkpoint is being read.
        running: requests that compute or generate.
        slots: most requests that can run.
        pages: of the pool, that can be given out.
        pages_free: of these, that nobody holds.
        pages_cached: of these, that the cache holds, alone or with requests.
        tiers: how full each tier of the cache is, by its name.
        remembered: boundaries that the cache knows, with and without bytes.
        ended: requests, by outcome.
        computed_tokens: tokens that prefills computed.
        restored_tokens: tokens that were restored in their place, by the tier of their latents.
        generated_tokens: tokens that were sampled.
        drafted_tokens, accepted_tokens: tokens that were guessed, and those of them that were right.
        first_token: seconds from `submit` to the first token.
        per_token: seconds between tokens of one request.
        step: seconds of steps that did something.
        evicted: checkpoints given up for others.
        lost: checkpoints that could not be read.
        memory_lost: how often the device's memory was lost.
        written: checkpoints written through to slower tiers, by tier.
        unwritten: checkpoints that were not, for want of room or time, by tier.
        copying_nbytes, copying_most_nbytes: device memory beside `nbytes` that holds what is written through, and the
            most that it may be.
        stores: what the stores of objects have done, by tier: outcomes of calls, and the breaker's state.
    """

    waiting: int
    waiting_tokens: int
    loading: int
    running: int
    slots: int
    pages: int
    pages_free: int
    pages_cached: int
    tiers: Mapping[str, TierStats]
    remembered: int
    ended: Mapping[str, int]
    computed_tokens: int
    restored_tokens: Mapping[str, int]
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    first_token: Times
    per_token: Times
    step: Times
    evicted: int
    lost: int
    memory_lost: int
    written: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)
    copying_nbytes: int = 0
    copying_most_nbytes: int = 0
    stores: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)


@dataclass(slots=True)
class Window:
    """Times as they come."""

    count: int = 0
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.total += seconds
        self.recent.append(seconds)

    def times(self) -> Times:
        """Those so far."""
        return Times(self.count, self.total, tuple(self.recent))


@dataclass(slots=True)
class Tally:
    """What the engine's thread counts."""

    ended: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    restored: Counter[str] = field(default_factory=Counter)
    first_token: Window = field(default_factory=Window)
    per_token: Window = field(default_factory=Window)
    step: Window = field(default_factory=Window)
    memory_lost: int = 0
