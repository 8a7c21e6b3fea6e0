"""A store in numbers."""

from __future__ import annotations

from typing import NamedTuple

from cache.tier import Tier


class Counts(NamedTuple):
    """What happened since the store was made.

    Attributes:
        puts: checkpoints that a tier took, copies from other tiers among them.
        skipped: checkpoints that found no room.
        evicted: checkpoints given up for others.
        lost: checkpoints that could not be read again.
    """

    puts: int = 0
    skipped: int = 0
    evicted: int = 0
    lost: int = 0


class TierStats(NamedTuple):
    """How full a tier is: checkpoints, pages of latents, bytes of both, and bytes that there may be."""

    checkpoints: int
    pages: int
    nbytes: int
    budget: int


class Stats(NamedTuple):
    """A store in numbers.

    Attributes:
        tiers: how full each is.
        remembered: boundaries, with and without bytes.
        pinned: boundaries that are pinned.
        counts: what happened so far.
    """

    tiers: dict[Tier, TierStats]
    remembered: int
    pinned: int
    counts: Counts
