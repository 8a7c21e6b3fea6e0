"""Which request computes what in the next step.

A function of what it is told: no arrays but tokens, no clock, no I/O, no threads. `step` names work, `done` commits it
when it was executed, `loaded` when a checkpoint was read. In between, requests come and go as they like; pages and
slots that work in flight may write are not given to anyone else before it is over.

The order of requests is total: priority, then arrival. Who is first can always be given everything, so that he ends,
and the next is first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache.holder import Holder
from cache.keys import KeyChain
from cache.placement import Placed, place
from cache.plan import Limits, ResumePlan
from cache.retention.protocol import Creation, Kind
from cache.tier import Tier
from cache.view import View
from kda_jax.engine.memory import Memory
from kda_jax.engine.pages import Pages, Slots
from kda_jax.engine.request import Live, Outcome, Overloaded, Refused, Request, Stage
from kda_jax.engine.work import (
    Chunk,
    Ended,
    Load,
    Report,
    Restore,
    Results,
    Row,
    Sampled,
    Snapshot,
    Source,
    Work,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a scheduler keeps to.

    Attributes:
        rows: latent rows a page; the store's pages are as long.
        state_pages: pages that a snapshot of a state takes, with the rows of an unfinished page.
        budget: tokens that are computed in a step.
        grid: tokens between the places where a prefill may be cut.
        snapshots: most checkpoints that a chunk makes.
        queued: most tokens that wait.

    Raises:
        ValueError: for values that are not positive, and for a budget below the grid.
    """

    rows: int
    state_pages: int
    budget: int = 2048
    grid: int = 64
    snapshots: int = 4
    queued: int = 1_000_000

    def __post_init__(self) -> None:
        values = self.rows, self.state_pages, self.budget, self.grid, self.snapshots, self.queued
        if min(values) < 1 or self.budget < self.grid:
            raise ValueError(f"sizes are positive and a budget is at least a step of the grid, got {self}")


class Scheduler:
    """Requests, and the pages and slots that they run in."""

    def __init__(self, holder: Holder, pages: Pages, slots: Slots, sizes: Sizes, creation: Creation) -> None:
        """
        Args:
            holder: of the store, whose device tier is the pool.
            pages: the pool's.
            slots: those of states.
            sizes: what it keeps to.
            creation: which checkpoints are made.

        Raises:
            ValueError: if the decode batch leaves no room in the token budget, or store and pool do not fit.
        """
        if slots.free + sizes.grid > sizes.budget + 1 or holder.store.prompts.page != sizes.rows:
            raise ValueError(
                f"a budget of {sizes.budget} tokens serves {slots.free} rows beside {sizes.grid} of a prefill, and "
                f"pages of {holder.store.prompts.page} and {sizes.rows} rows must be the same"
            )
        self.memory, self.slots, self.sizes, self.creation = Memory(holder, pages), slots, sizes, creation
        self.live: dict[int, Live] = {}
        self.in_flight: Work | None = None
        self._arrivals = 0
        self._tokens: list[tuple[int, int]] = []
        self._ended: list[Ended] = []
        self._published: list[bytes] = []

    @property
    def queued(self) -> int:
        """Tokens of requests that wait."""
        return sum(len(live.tokens) for live in self.live.values() if live.stage is Stage.WAITING)

    def submit(self, request: Request) -> None:
        """Takes a request.

        Raises:
            Overloaded: if too many tokens wait.
            Refused: if its prompt and what it may generate exceed the pool.
            ValueError: for an id that is in use.
        """
        if request.id in self.live:
            raise ValueError(f"request {request.id} is there already; every request has an id of its own")
        most = len(request.tokens) + request.max_new_tokens
        pages, there = self._pages_for(most), self.memory.pages.capacity
        if pages > there:
            raise Refused(
                f"{len(request.tokens)} tokens and {request.max_new_tokens} new ones need {pages} pages, the pool has "
                f"{there}: shorten the prompt or max_new_tokens"
            )
        if (queued := self.queued) + len(request.tokens) > self.sizes.queued:
            raise Overloaded(f"{queued} tokens wait, the most is {self.sizes.queued}: come again later")
        self.live[request.id] = Live(request, self._arrivals, request.tokens)
        self._arrivals += 1

    def cancel(self, id: int) -> bool:
        """Ends a request, if it has not ended. Whether it had not."""
        live = self.live.get(id)
        if live is None or live.outcome:
            return False
        self._end(live, Outcome.CANCELLED)
        self._sweep()
        return True

    def step(self, now: float) -> Work:
        """The next step. While it is not `done` there is no other.

        Args:
            now: seconds, on the clock of the deadlines.
        """
        assert self.in_flight is None, "a step is in flight"
        self._expire(now)
        self._sweep()
        rows = self._rows(now)
        zeros, restores, loads = self._admit(now)
        rows = tuple(
            row for row in rows if self.live[row.id].stage is Stage.DECODING
        )  # others were preempted
        chunks = self._chunks(self.sizes.budget - len(rows), now)
        snapshots = tuple(self._snapshot(live) for live in self._ordered(Stage.SAVING))
        work = Work(snapshots, zeros, restores, chunks, rows, loads)
        for each in (*snapshots, *restores, *chunks, *rows, *loads):
            self.live[each.id].busy = True
        self.in_flight = work
        return work

    def done(self, work: Work, results: Results, now: float) -> None:
        """A step was executed: what it computed is taken in, and what it wrote is published."""
        assert work is self.in_flight, "another step is in flight"
        self.in_flight = None
        for each in (*work.snapshots, *work.restores, *work.chunks, *work.rows):
            self.live[each.id].busy = False
        for restore in work.restores:
            self._restored(self.live[restore.id], restore.id in results.failed)
        for chunk in work.chunks:
            self._computed(chunk, results, now)
        for row in work.rows:
            live = self.live[row.id]
            if row.id in results.failed:
                self._end(live, Outcome.FAILED)
            else:
                live.computed += 1
                self._sampled(live, results.sampled[row.id], now)
        for snapshot in work.snapshots:
            self._saved(snapshot, snapshot.id in results.failed, now)
        self._sweep()

    def loaded(self, id: int, attempt: int, lost: Iterable[tuple[Tier, bytes | None]], now: float) -> None:
        """A load is over, and nothing writes its pages and its slot any more.

        Args:
            id: of the request.
            attempt: of the load.
            lost: what could not be read, by tier: the name of a page, or None for the state. Empty if all was read.
            now: seconds.
        """
        live = self.live[id]
        assert live.stage is Stage.LOADING and live.attempt == attempt, "no such load"
        live.busy = False
        broken, key = list(lost), live.pinned
        for tier, page in broken:
            live.tiers &= ~tier.bit
            if key is not None:
                self.memory.lose(key, tier, page, now)
        self._unpin(live)
        if broken and not live.outcome:
            self._back(live)
        else:
            live.stage = Stage.PREFILLING
        self._sweep()

    def report(self) -> Report:
        """What there is to tell since the last report."""
        report = Report(tuple(self._tokens), tuple(self._ended), tuple(self._published))
        self._tokens, self._ended, self._published = [], [], []
        return report

    # Decoding

    def _rows(self, now: float) -> tuple[Row, ...]:
        """A row of every request that decodes and has a page to write to."""
        rows = []
        for live in self._ordered(Stage.DECODING):
            if live.stage is Stage.DECODING and self._has_page(live, now):
                assert live.slot is not None
                token = int(live.tokens[live.computed])
                rows.append(Row(live.request.id, live.slot, live.computed, token, tuple(live.table)))
        return tuple(rows)

    def _has_page(self, live: Live, now: float) -> bool:
        """Whether the next row has a page; if not, who is last makes room, and that takes a step."""
        if live.computed < len(live.table) * self.sizes.rows:
            return True
        while True:
            last = self._last(live)
            spare = self.sizes.state_pages if last else 0  # for the state of who is preempted
            if self._room(1 + spare, live, now):
                break
            self._preempt(last or live, now)
            if last is None:  # who is before him needs the pages
                return False
            if last.stage is Stage.SAVING:
                if not self._room(1, live, now):
                    return False
                break
        pages = self.memory.pages.take(1)
        assert pages is not None
        live.table += pages
        return True

    def _last(self, live: Live, below: int | None = None) -> Live | None:
        """Who runs, comes last and behind `live` and can be preempted, of a priority under `below`."""
        stages = Stage.PREFILLING, Stage.DECODING
        running = [other for other in self._ordered(*stages) if not other.busy and other.rank > live.rank]
        if below is not None:
            running = [other for other in running if other.request.priority < below]
        return running[-1] if running else None

    def _preempt(self, live: Live, now: float) -> None:
        """Its state becomes a checkpoint, where there is room for one, and it waits."""
        pages = self._state_pages(now) if live.computed else None
        if pages is None:
            self._back(live)
        else:
            live.stage, live.saving = Stage.SAVING, pages

    # Admission

    def _admit(self, now: float) -> tuple[tuple[int, ...], tuple[Restore, ...], tuple[Load, ...]]:
        """Starts requests in their order, until one has to wait: with slots to clear, to restore, or to load."""
        zeros, restores, loads = [], [], []
        for live in self._ordered(Stage.WAITING):
            plan = self._reserve(live, now) if self._slot(live, now) else None
            if plan is None:
                break
            live.slot, live.attempt = self.slots.take(), live.attempt + 1
            assert live.slot is not None
            live.computed, live.stage = plan.boundary, Stage.PREFILLING
            live.stops = place(plan, len(live.tokens), Limits(grid=self.sizes.grid), self.creation)
            if plan.state is None:
                zeros.append(live.slot)
            elif all(tier is Tier.DEVICE for tier in (plan.state, *(rows.tier for rows in plan.rows))):
                restores.append(self._restore(live, plan))
            else:
                live.stage = Stage.LOADING
                loads.append(self._load(live, plan))
        return tuple(zeros), tuple(restores), tuple(loads)

    def _slot(self, live: Live, now: float) -> bool:
        """Whether a slot is free; if not, who has a lower priority and comes last gives up his."""
        if not self.slots.free and not self._ordered(Stage.SAVING):
            last = self._last(live, below=live.request.priority)
            if last:
                self._preempt(last, now)
        return self.slots.free > 0

    def _reserve(self, live: Live, now: float) -> ResumePlan | None:
        """A plan, its boundary pinned and its pages taken; None if the request must wait."""
        store = self.memory.holder.store
        seen = store.match(live.request.namespace, live.tokens)
        limits = Limits(grid=self.sizes.grid, tiers=live.tiers)
        plan = store.plan(seen, len(live.tokens), limits, live.request.remote)
        del store  # old versions keep pages
        self._pin(live, plan.key)
        if not self._take(live, plan, now):
            last = self._last(live, below=live.request.priority)
            if last:
                self._preempt(last, now)
            if any(other.slot is not None for other in self.live.values()):
                return None
            # alone, and what it would resume from takes the room that it needs
            self._unpin(live)
            plan = self.memory.holder.store.plan(View(), len(live.tokens), limits)
            if not self._take(live, plan, now):
                return None
        self.memory.holder.update(lambda store: store.used(seen, plan.key, now))
        return plan

    def _take(self, live: Live, plan: ResumePlan, now: float) -> bool:
        """Whether a request has the pages of its prompt and of the next token: those that the pool holds are shared."""
        rows, shared = self.sizes.rows, {}
        names = self._chain(live, plan.boundary).added
        for source in plan.rows:
            if source.tier is Tier.DEVICE:
                for number in range(source.start // rows, source.stop // rows):
                    shared[number] = self.memory.page(names[number])
        total = self._pages_for(len(live.tokens) + 1)
        self.memory.pages.share(tuple(shared.values()))
        count = total - len(shared)
        others = any(other.slot is not None for other in self.live.values())
        spare = self.sizes.state_pages if others else 0
        fresh = self.memory.pages.take(count) if self._room(count + spare, live, now) else None
        if fresh is None:
            self.memory.pages.give_back(tuple(shared.values()))
            return False
        new = iter(fresh)
        live.table = [shared[number] if number in shared else next(new) for number in range(total)]
        return True

    def _restore(self, live: Live, plan: ResumePlan) -> Restore:
        assert live.slot is not None and plan.key is not None
        pages = self.memory.state(plan.key)
        return Restore(live.request.id, live.slot, plan.boundary, pages, self._tail(live, plan.boundary))

    def _load(self, live: Live, plan: ResumePlan) -> Load:
        assert live.slot is not None and plan.state is not None
        rows, shelves, chain = (
            self.sizes.rows,
            self.memory.holder.store.shelves,
            self._chain(live, plan.boundary),
        )
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
        tail = self._tail(live, plan.boundary)
        id, attempt = live.request.id, live.attempt
        return Load(id, attempt, live.slot, plan.boundary, chain.key, plan.state, kept, tail, tuple(pages))

    def _tail(self, live: Live, boundary: int) -> int | None:
        """The page for the rows of a checkpoint that are behind its last whole page."""
        return live.table[boundary // self.sizes.rows] if boundary % self.sizes.rows else None

    # Prefill

    def _chunks(self, budget: int, now: float) -> tuple[Chunk, ...]:
        """Chunks of prefills in their order, until the budget is spent."""
        chunks = []
        for live in self._ordered(Stage.PREFILLING):
            start, end = live.computed, len(live.tokens)
            stop = end if end - start <= budget else (start + budget) // self.sizes.grid * self.sizes.grid
            if stop <= start:
                break
            stops = [placed for placed in live.stops if start < placed.boundary <= stop]
            if len(stops) > self.sizes.snapshots:
                stops = stops[: self.sizes.snapshots]
                stop = stops[-1].boundary
            assert live.slot is not None
            snapshots = self._snapshots(live, stops, now)
            tokens, table = live.tokens[start:stop], tuple(live.table)
            chunks.append(Chunk(live.request.id, live.slot, start, tokens, table, snapshots, stop == end))
            budget -= stop - start
        return tuple(chunks)

    def _snapshots(self, live: Live, stops: Iterable[Placed], now: float) -> tuple[Snapshot, ...]:
        """Those checkpoints of a chunk that there is room for."""
        assert live.slot is not None
        snapshots = []
        for boundary, kind in stops:
            pages = self._state_pages(now)
            if pages:
                snapshots.append(
                    Snapshot(live.request.id, live.slot, boundary, kind, pages, tuple(live.table))
                )
        return tuple(snapshots)

    # Commits

    def _restored(self, live: Live, failed: bool) -> None:
        self._unpin(live)
        if failed:
            self._end(live, Outcome.FAILED)

    def _computed(self, chunk: Chunk, results: Results, now: float) -> None:
        live = self.live[chunk.id]
        if chunk.id in results.failed:
            for snapshot in chunk.snapshots:
                self.memory.pages.give_back(snapshot.pages)
            self._end(live, Outcome.FAILED)
            return
        for snapshot in chunk.snapshots:
            self._publish(live, snapshot, now)
        live.computed = chunk.start + len(chunk.tokens)
        if chunk.samples:
            live.stage = Stage.DECODING
            self._sampled(live, results.sampled[chunk.id], now)

    def _sampled(self, live: Live, sampled: Sampled, now: float) -> None:
        """Takes a token; with the last one the request ends, and its state is saved where there is room."""
        if live.outcome:
            return
        live.append(sampled.token)
        self._tokens.append((live.request.id, sampled.token))
        if not sampled.last and live.generated < live.request.max_new_tokens:
            return
        self._end(live, Outcome.FINISHED)
        wanted = Kind.GENERATION_END in self.creation.kinds
        if wanted and not self.memory.holds(live.request.namespace, live.tokens[: live.computed]):
            pages = self._state_pages(now)
            if pages:
                live.stage, live.saving = Stage.SAVING, pages

    def _snapshot(self, live: Live) -> Snapshot:
        assert live.slot is not None
        table = tuple(live.table)
        return Snapshot(live.request.id, live.slot, live.computed, Kind.GENERATION_END, live.saving, table)

    def _saved(self, snapshot: Snapshot, failed: bool, now: float) -> None:
        live = self.live[snapshot.id]
        live.saving = ()
        if failed:
            self.memory.pages.give_back(snapshot.pages)
            key = None
        else:
            key = self._publish(live, snapshot, now)
        live.stage = Stage.DECODING
        if not live.outcome:
            self._back(live)
            self._pin(live, key)

    def _publish(self, live: Live, snapshot: Snapshot, now: float) -> bytes | None:
        tokens = live.tokens[: snapshot.boundary]
        key = self.memory.publish(
            live.request.namespace, tokens, snapshot.table, snapshot.pages, snapshot.kind, now
        )
        if key is not None:
            self._published.append(key)
        return key

    # Ends

    def _expire(self, now: float) -> None:
        for live in list(self.live.values()):
            deadline = live.request.deadline
            if deadline is not None and deadline <= now and not live.outcome:
                self._end(live, Outcome.EXPIRED)

    def _end(self, live: Live, outcome: Outcome) -> None:
        """A request ends once; `_sweep` lets it go."""
        if not live.outcome:
            live.outcome = outcome
            self._ended.append(Ended(live.request.id, outcome))

    def _sweep(self) -> None:
        """Requests that ended leave, when no work in flight names them and their state is saved."""
        for live in list(self.live.values()):
            if live.outcome and not live.busy and live.stage is not Stage.SAVING:
                self._release(live)
                del self.live[live.request.id]

    def _back(self, live: Live) -> None:
        """A request gives up its pages and its slot, and waits."""
        self._release(live)
        live.stage, live.computed = Stage.WAITING, 0

    def _release(self, live: Live) -> None:
        self._unpin(live)
        self.memory.pages.give_back((*live.table, *live.saving))
        live.table, live.saving = [], ()
        if live.slot is not None:
            self.slots.give_back(live.slot)
        live.slot = None

    # Pages and pins

    def _room(self, count: int, live: Live, now: float) -> bool:
        """Whether `count` pages are free, after evicting what nobody pins but requests that wait behind `live`."""

        def let_go() -> bool:
            waiting = [
                other for other in self._ordered(Stage.WAITING) if other.pinned and other.rank > live.rank
            ]
            if waiting:
                self._unpin(waiting[-1])
            return bool(waiting)

        return self.memory.room(count, now, let_go)

    def _state_pages(self, now: float) -> tuple[int, ...] | None:
        """Pages for a state, where there is room: nobody has to wait for a checkpoint."""
        count = self.sizes.state_pages
        return self.memory.pages.take(count) if self.memory.room(count, now) else None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.sizes.rows)

    def _pin(self, live: Live, key: bytes | None) -> None:
        """Pins a boundary for a request, in place of the one before."""
        if key is not None:
            self.memory.holder.update(lambda store: store.pin(key))
        self._unpin(live)
        live.pinned = key

    def _unpin(self, live: Live) -> None:
        key, live.pinned = live.pinned, None
        if key is not None:
            self.memory.holder.update(lambda store: store.unpin(key))

    def _chain(self, live: Live, boundary: int) -> KeyChain:
        return KeyChain.start(live.request.namespace, self.sizes.rows).extend(live.tokens[:boundary])

    def _ordered(self, *stages: Stage) -> list[Live]:
        """Requests in these stages that have not ended, in order; with those that ended and are saved."""
        return sorted(
            (
                live
                for live in self.live.values()
                if live.stage in stages and (not live.outcome or live.stage is Stage.SAVING)
            ),
            key=lambda live: live.rank,
        )
