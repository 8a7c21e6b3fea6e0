"""Engines of the small model with tiers behind the device, and when these are at rest."""

from __future__ import annotations

import random
import time
from typing import Any

from engine_site import CONFIG, engine
from engine_storm import Eager

from cache.retention import Creation, Kind
from kda_jax.engine import Engine

ENDS = Creation(kinds=frozenset({Kind.PROMPT_END, Kind.GENERATION_END, Kind.MISSING}))


def eager(**options: Any) -> Engine:
    return engine(**{"rates": Eager(), "creation": ENDS, **options})


def written(made: Engine) -> None:
    """Waits until nothing is on its way to a slower tier."""
    until = time.monotonic() + 30
    while made._owner.ask(lambda: made._loop.busy):
        assert time.monotonic() < until
        time.sleep(0.005)


def forget_device(made: Engine) -> None:
    made._owner.ask(lambda: made._loop.scheduler.pool.clear(0.0))


def prompt_of(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=length)
