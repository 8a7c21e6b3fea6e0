"""How requests start: a plan, its boundary pinned, then pages and a slot, or a place in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from cache.keys import KeyChain
from cache.placement import place
from cache.plan import Limits, ResumePlan
from cache.retention.protocol import Creation
from cache.tier import Tier
from cache.view import View
from kda_jax.engine.holdings import Holdings
from kda_jax.engine.request import Live, Stage
from kda_jax.engine.work import Load, Restore, Source, Zero


class Begun(NamedTuple):
    """What it takes to start requests: slots to clear, states to restore and checkpoints to load."""

    zeros: tuple[Zero, ...]
    restores: tuple[Restore, ...]
    loads: tuple[Load, ...]


@runtime_checkable
class Pace(Protocol):
    """Decides whether to load."""

    def seconds(self, plan: ResumePlan, num_tokens: int) -> float:
        """What a request of so many tokens is expected to take up to its first token if it starts by a plan."""
        ...

    def started(self, plan: ResumePlan, plans: Sequence[ResumePlan]) -> None:
        """A request starts by one of its plans."""
        ...


def admit(holdings: Holdings, creation: Creation, pace: Pace | None, now: float) -> Begun:
    """Starts requests in their order, until one has to wait. Without `pace`, deeper is better."""
    zeros, restores, loads = [], [], []
    while queue := holdings.ordered(Stage.WAITING, Stage.SAVING):  # anew each time: who is preempted is in it
        live = next((each for each in queue if not each.outcome), queue[0])
        if live.stage is Stage.SAVING:
            break
        plan = _reserve(holdings, live, pace, now) if _slot(holdings, live, now) else None
        if plan is None:
            break
        live.slot, live.attempt = holdings.slots.take(), live.attempt + 1
        assert live.slot is not None
        live.computed, live.stage = plan.boundary, Stage.PREFILLING
        live.stops = place(plan, len(live.tokens), Limits(grid=holdings.sizes.grid), creation)
        if plan.state is None:
            zeros.append(Zero(live.request.id, live.slot))
        elif all(tier is Tier.DEVICE for tier in (plan.state, *(rows.tier for rows in plan.rows))):
            restores.append(_restore(holdings, live, plan))
        else:
            live.stage = Stage.LOADING
            loads.append(_load(holdings, live, plan))
    return Begun(tuple(zeros), tuple(restores), tuple(loads))


def _slot(holdings: Holdings, live: Live, now: float) -> bool:
    """Whether a slot is free; if not, who has a lower priority and comes last gives up his."""
    if not holdings.slots.free and not holdings.ordered(Stage.SAVING):
        last = holdings.last(live, below=live.request.priority)
        if last:
            holdings.preempt(last, now)
    return holdings.slots.free > 0


def _plans(holdings: Holdings, live: Live, seen: View, pace: Pace | None) -> list[ResumePlan]:
    """Where a request may resume: as deep as can be, and with `pace` also from fewer tiers, which may be quicker."""
    plans, store, count = [], holdings.pool.holder.store, len(live.tokens)
    for slowest in sorted(Tier, reverse=True) if pace else [max(Tier)]:
        tiers = live.tiers & (2 * slowest.bit - 1)
        limits = Limits(grid=holdings.sizes.grid, tiers=tiers)
        plan = store.plan(seen, count, limits, live.request.remote)
        if not plans or plan.boundary < plans[-1].boundary or plan.state != plans[-1].state:
            plans.append(plan)
    return plans


def _reserve(holdings: Holdings, live: Live, pace: Pace | None, now: float) -> ResumePlan | None:
    """A plan, its boundary pinned and its pages taken; None if the request must wait."""
    holdings.unpin(live)  # what only this pin has kept in the store is not there to plan with
    store = holdings.pool.holder.store
    seen = store.match(live.request.namespace, live.tokens)
    del store  # old versions keep pages
    plans = _plans(holdings, live, seen, pace)
    plan = min(plans, key=lambda plan: pace.seconds(plan, len(live.tokens))) if pace else plans[0]
    holdings.pin(live, plan.key)
    if not _take(holdings, live, plan, now):
        last = holdings.last(live, below=live.request.priority)
        if last:
            holdings.preempt(last, now)
        if any(other.slot is not None for other in holdings.live.values()):
            return None
        # alone, and what it would resume from takes the room that it needs
        holdings.unpin(live)
        limits = Limits(grid=holdings.sizes.grid)
        plan = holdings.pool.holder.store.plan(View(), len(live.tokens), limits)
        if not _take(holdings, live, plan, now):
            return None
    elif pace:
        pace.started(plan, plans)
    holdings.pool.holder.update(lambda store: store.used(seen, plan.key, now))
    return plan


def _take(holdings: Holdings, live: Live, plan: ResumePlan, now: float) -> bool:
    """Whether a request has the pages of its prompt and of the next token: those that the pool holds are shared."""
    rows, shared = holdings.sizes.rows, {}
    names = _chain(holdings, live, plan.boundary).added
    for source in plan.rows:
        if source.tier is Tier.DEVICE:
            for number in range(source.start // rows, source.stop // rows):
                shared[number] = holdings.pool.page(names[number])
    total = holdings.pages_for(len(live.tokens) + 1)
    holdings.pool.pages.share(tuple(shared.values()))
    count = total - len(shared)
    others = any(other.slot is not None for other in holdings.live.values())
    spare = holdings.sizes.state_pages if others else 0
    fresh = holdings.pool.pages.take(count) if holdings.room(count + spare, live, now) else None
    if fresh is None:
        holdings.pool.pages.give_back(tuple(shared.values()))
        return False
    new = iter(fresh)
    live.table = [shared[number] if number in shared else next(new) for number in range(total)]
    return True


def _restore(holdings: Holdings, live: Live, plan: ResumePlan) -> Restore:
    assert live.slot is not None and plan.key is not None
    pages = holdings.pool.state(plan.key)
    return Restore(live.request.id, live.slot, plan.boundary, pages, _tail(holdings, live, plan.boundary))


def _load(holdings: Holdings, live: Live, plan: ResumePlan) -> Load:
    assert live.slot is not None and plan.state is not None
    rows, shelves = holdings.sizes.rows, holdings.pool.holder.store.shelves
    chain = _chain(holdings, live, plan.boundary)
    pages = []
    for source in plan.rows:
        shelf = shelves.get(source.tier)
        if source.tier is not Tier.DEVICE:
            for number in range(source.start // rows, source.stop // rows):
                name = chain.added[number]
                kept = shelf.pages.get(name) if shelf else None
                pages.append(Source(live.table[number], source.tier, name, kept))
    shelf = shelves.get(plan.state)
    kept = shelf.states.get(chain.key) if shelf else None
    tail = _tail(holdings, live, plan.boundary)
    id, attempt = live.request.id, live.attempt
    return Load(id, attempt, live.slot, plan.boundary, chain.key, plan.state, kept, tail, tuple(pages))


def _tail(holdings: Holdings, live: Live, boundary: int) -> int | None:
    """The page for the rows of a checkpoint that are behind its last whole page."""
    return live.table[boundary // holdings.sizes.rows] if boundary % holdings.sizes.rows else None


def _chain(holdings: Holdings, live: Live, boundary: int) -> KeyChain:
    return KeyChain.start(live.request.namespace, holdings.sizes.rows).extend(live.tokens[:boundary])
