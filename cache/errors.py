"""What is wrong with bytes that were offered to the cache."""

from __future__ import annotations

from cache.tier import Tier


class Conflict(ValueError):
    """Other bytes for a key that a tier holds already. A key names its contents: one of the two is wrong."""

    def __init__(self, key: bytes, tier: Tier) -> None:
        super().__init__(
            f"other bytes for checkpoint {key.hex()[:16]}, which tier {tier.name.lower()} holds: the namespace lacks "
            "something that the state depends on, or a published array was changed"
        )
        self.key, self.tier = key, tier
