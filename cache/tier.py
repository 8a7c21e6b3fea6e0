"""The places a checkpoint can be, fastest first."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Where bytes are. A set of tiers is an int with a bit each."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    @property
    def bit(self) -> int:
        """The set of this tier alone."""
        return 1 << self


ALL_TIERS = (1 << len(Tier)) - 1


def fastest(tiers: int) -> Tier:
    """The fastest of a set that is not empty."""
    return Tier((tiers & -tiers).bit_length() - 1)
