"""What is wrong with bytes that were offered to the cache, or that it asks for."""

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


class Broken(Exception):
    """Bytes that a tier should hold are missing, short or not those that were written: a miss, never an answer.

    Attributes:
        key: of the checkpoint.
        tier: that holds it.
        page: name of the page, None for the state.
    """

    def __init__(self, key: bytes, tier: Tier, page: bytes | None, reason: str) -> None:
        what = "state" if page is None else f"page {page.hex()[:16]}"
        super().__init__(
            f"checkpoint {key.hex()[:16]}, {what} in tier {tier.name.lower()}: {reason}; it is dropped"
        )
        self.key, self.tier, self.page = key, tier, page
