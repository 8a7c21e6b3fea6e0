"""An engine's statistics, gathered from its parts."""

from __future__ import annotations

from collections import Counter

from cache.tier import Tier
from kda_jax.engine.explain import name
from kda_jax.engine.request import Stage
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.slower import Slower
from kda_jax.engine.statistics import Statistics, Tally


def numbers(
    scheduler: Scheduler, tally: Tally, slower: Slower, searching: int, waiting_tokens: int
) -> Statistics:
    """All in numbers, on the engine's thread.

    Args:
        scheduler, slower: the engine's.
        tally: what its loop has counted.
        searching: requests that the scheduler has not seen yet.
        waiting_tokens: tokens of all requests without a slot.
    """
    store, pages = scheduler.pool.holder.store, scheduler.pool.pages
    stages = Counter(live.stage for live in scheduler.live.values())
    full = store.stats()
    return Statistics(
        waiting=stages[Stage.WAITING] + searching,
        waiting_tokens=waiting_tokens,
        loading=stages[Stage.LOADING],
        running=sum(stages[stage] for stage in (Stage.PREFILLING, Stage.DECODING, Stage.SAVING)),
        slots=scheduler.holdings.slots.num_slots - 1,
        pages=pages.capacity,
        pages_free=pages.free,
        pages_cached=full.tiers[Tier.DEVICE].nbytes // pages.page_nbytes,
        tiers={name(tier): each for tier, each in full.tiers.items()},
        remembered=full.remembered,
        ended=dict(tally.ended),
        computed_tokens=tally.computed,
        restored_tokens=dict(tally.restored),
        generated_tokens=tally.generated,
        drafted_tokens=tally.drafted,
        accepted_tokens=tally.accepted,
        first_token=tally.first_token.times(),
        per_token=tally.per_token.times(),
        step=tally.step.times(),
        evicted=full.counts.evicted,
        lost=full.counts.lost,
        memory_lost=tally.memory_lost,
        written=dict(slower.writing.written),
        unwritten=dict(slower.writing.unwritten),
        copying_nbytes=slower.writing.copying.nbytes,
        copying_most_nbytes=slower.writing.copying.most_nbytes,
        stores=slower.stores(),
    )
