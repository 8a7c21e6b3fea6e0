"""What a seed of the engine's simulation decides before anything happens."""

from __future__ import annotations

import random
from typing import NamedTuple

from cache.retention.protocol import Creation, Kind
from kda_jax.engine.sizes import Sizes

NAMESPACES = (b"a" * 32, b"b" * 32)
PAGE_NBYTES = 64
RATES = {
    **{"step": 0.01, "row": 0.01, "load": 0.1, "cancel": 0.05, "deadline": 0.05},
    **{"lost": 0.05, "damaged": 0.05, "full": 0.1, "kill": 0.02},
}
"""Of faults by their kind: of a step and of a part of it, of a load, of those who ask, of the remote store's objects
and writes, of a whole instance."""


class Setup(NamedTuple):
    """What a seed decides before anything happens."""

    sizes: Sizes
    num_pages: int
    num_slots: int
    device: float
    """Part of the pool that checkpoints may take."""
    host: int
    """Pages of the host tier."""
    creation: Creation
    learned: bool
    """Whether what is evicted is decided by the policy that learns, or simply by age."""
    instances: int
    remote: int
    """Most objects of the remote store; 0 for none."""
    requests: int
    longest: int
    most_new: int
    rates: dict[str, float]
    """Of faults by their kind; some are wholly off."""

    @classmethod
    def draw(cls, seed: int) -> Setup:
        random_ = random.Random(f"setup {seed}")
        choose, chance = random_.choice, random_.random
        grid, slots = choose([1, 2, 4]), choose([2, 3, 5])
        rows, state_pages = choose([1, 2, 3, 4]), choose([1, 1, 2, 4])
        longest, most_new = choose([6, 12, 30]), choose([1, 4, 12])
        least = -(-(longest + most_new) // rows)  # pages of the largest request, and not one more
        kinds = frozenset(kind for kind in Kind if chance() < 0.8)
        rates = {kind: choose([0.0, rate, rate, 5 * rate]) for kind, rate in RATES.items()}
        return cls(
            sizes=Sizes(
                rows=rows,
                state_pages=state_pages,
                budget=grid + slots - 1 + choose([0, 1, 5, 40]),
                grid=grid,
                snapshots=choose([1, 2, 4]),
                queued=choose([40, 10**6]),
                drafts=random.Random(f"guesses {seed}").choice([0, 0, 1, 3, 8]),
            ),
            num_pages=1 + least + choose([0, 0, 1, 3, 10, 60]),
            num_slots=slots,
            device=choose([1.0, 1.0, 0.5]),
            host=choose([0, 20, 200]),
            creation=Creation(kinds=kinds, interval=choose([0, 0, 4]), before_end=choose([(), (2,)])),
            instances=(instances := choose([1, 1, 2, 3, 8])),
            remote=choose([0, 4, 1000]) if instances == 1 else choose([4, 30, 1000]),
            requests=choose([10, 40]),
            longest=longest,
            most_new=most_new,
            rates=rates,
            learned=chance() < 0.5,
        )
