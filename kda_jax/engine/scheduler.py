"""Which request computes what in the next step.

A function of what it is told: no arrays but tokens, no clock, no I/O, no threads. `step` names work, `done` commits it
when it was executed, `loaded` when a checkpoint was read. In between, requests come and go as they like; pages and
slots that work in flight may write are not given to anyone else before it is over.

The order of requests is total: priority, then arrival. Who is first can always be given everything, so that he ends,
and the next is first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from cache.holder import Holder
from cache.retention.protocol import Creation, Kind
from cache.tier import Tier
from kda_jax.engine.admission import Pace, admit
from kda_jax.engine.decoding import decode_rows
from kda_jax.engine.drafting import with_drafts
from kda_jax.engine.holdings import Holdings
from kda_jax.engine.lookup import Drafter
from kda_jax.engine.pages import Pages, Slots
from kda_jax.engine.pool import Pool
from kda_jax.engine.prefilling import prefill_chunks
from kda_jax.engine.request import Live, Outcome, Overloaded, Refused, Request, Stage
from kda_jax.engine.sizes import Sizes
from kda_jax.engine.work import Chunk, Ended, Report, Results, Sampled, Snapshot, Work

Beside: TypeAlias = Callable[[int, int, int], int]
"""Most tokens of prefills in a step, of the rows that decode in it, the grid and the budget."""


class Scheduler:
    """Requests, and the pages and slots that they run in."""

    def __init__(
        self,
        holder: Holder,
        pages: Pages,
        slots: Slots,
        sizes: Sizes,
        creation: Creation,
        pace: Pace | None = None,
    ) -> None:
        """
        Args:
            holder: of the store, whose device tier is the pool.
            pages: the pool's.
            slots: those of states.
            sizes: what it keeps to.
            creation: which checkpoints are made; may be set anew between steps.
            pace: what starting by a plan takes, to choose whether to load; None to load whatever is held.

        Raises:
            ValueError: if the decode batch leaves no room in the token budget, or store and pool do not fit.
        """
        if slots.free + sizes.grid > sizes.budget + 1 or holder.store.prompts.page != sizes.rows:
            raise ValueError(
                f"a budget of {sizes.budget} tokens serves {slots.free} rows beside {sizes.grid} of a prefill, and "
                f"pages of {holder.store.prompts.page} and {sizes.rows} rows must be the same"
            )
        self.pool, self.sizes, self.creation = Pool(holder, pages), sizes, creation
        self._pace = pace
        self.holdings = Holdings(self.pool, slots, sizes)
        self.live = self.holdings.live
        self.in_flight: Work | None = None
        self._arrivals = 0
        self._tokens: list[tuple[int, int]] = []
        self._ended: list[Ended] = []
        self._published: list[bytes] = []

    def submit(self, request: Request, drafter: Drafter | None = None) -> None:
        """Takes a request.

        Args:
            request: what is asked for.
            drafter: guesses how it goes on, of this request alone; the tokens do not depend on it.

        Raises:
            Overloaded: if too many tokens wait.
            Refused: if its prompt and what it may generate exceed the pool.
            ValueError: for an id that is in use.
        """
        if request.id in self.live:
            raise ValueError(f"request {request.id} is there already; every request has an id of its own")
        most = len(request.tokens) + request.max_new_tokens
        pages, there = self.holdings.pages_for(most), self.pool.pages.capacity
        if pages > there:
            raise Refused(
                f"{len(request.tokens)} tokens and {request.max_new_tokens} new ones need {pages} pages, the pool has "
                f"{there}: shorten the prompt or max_new_tokens"
            )
        if (queued := self.holdings.queued) + len(request.tokens) > self.sizes.queued:
            raise Overloaded(f"{queued} tokens wait, the most is {self.sizes.queued}: come again later")
        self.live[request.id] = Live(request, self._arrivals, request.tokens, drafter=drafter)
        self._arrivals += 1

    def cancel(self, id: int) -> bool:
        """Ends a request, if it has not ended. Whether it had not."""
        live = self.live.get(id)
        if live is None or live.outcome:
            return False
        self._end(live, Outcome.CANCELLED)
        self._sweep()
        return True

    def retire(self, id: int, now: float) -> None:
        """Ends a request between steps, and what it has computed becomes a checkpoint, where there is room."""
        live = self.live.get(id)
        if live is None or live.outcome:
            return
        self._end(live, Outcome.CANCELLED)
        if live.stage in (Stage.PREFILLING, Stage.DECODING):
            self._save(live, now)
        self._sweep()

    def step(self, now: float, beside: Beside | None = None) -> Work:
        """The next step. While it is not `done` there is no other.

        Args:
            now: seconds, on the clock of the deadlines.
            beside: how much of prefills a step with rows that decode may read; None for the budget alone.
        """
        assert self.in_flight is None, "a step is in flight"
        self._expire(now)
        self._sweep()
        rows = decode_rows(self.holdings, now)
        zeros, restores, loads = admit(self.holdings, self.creation, self._pace, now)
        rows = [row for row in rows if self.live[row.id].stage is Stage.DECODING]  # others were preempted
        rows = with_drafts(self.holdings, rows)
        left = self.sizes.budget - sum(1 + len(row.drafts) for row in rows)
        if rows and beside is not None:
            left = min(left, beside(len(rows), self.sizes.grid, self.sizes.budget))
        chunks = prefill_chunks(self.holdings, left, now)
        snapshots = tuple(self._snapshot(live) for live in self.holdings.ordered(Stage.SAVING))
        work = Work(snapshots, zeros, restores, chunks, rows, loads)
        for each in (*snapshots, *zeros, *restores, *chunks, *rows, *loads):
            self.live[each.id].busy = True
        self.in_flight = work
        return work

    def done(self, work: Work, results: Results, now: float) -> None:
        """A step was executed: what it computed is taken in, and what it wrote is published."""
        assert work is self.in_flight, "another step is in flight"
        self.in_flight = None
        for each in (*work.snapshots, *work.zeros, *work.restores, *work.chunks, *work.rows):
            self.live[each.id].busy = False
        for zero in work.zeros:
            if zero.id in results.failed:
                self._end(self.live[zero.id], Outcome.FAILED)
        for restore in work.restores:
            self._restored(self.live[restore.id], restore.id in results.failed)
        for chunk in work.chunks:
            self._computed(chunk, results, now)
        for row in work.rows:
            live = self.live[row.id]
            if row.id in results.failed:
                self._end(live, Outcome.FAILED)
            else:
                sampled = results.sampled[row.id]
                live.computed += 1 + sampled.accepted
                self._sampled(live, sampled, now, row.drafts)
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
                self.pool.lose(key, tier, page, now)
        self.holdings.unpin(live)
        if broken and not live.outcome:
            self.holdings.back(live)
        else:
            live.stage = Stage.PREFILLING
            held = self.pool.holds(live.request.namespace, live.tokens[: live.computed])
            if Kind.MISSING in self.creation.kinds and not held:  # whoever comes next need not load it again
                live.loaded = live.computed
        self._sweep()

    def memory_lost(self, now: float) -> None:
        """All pages and slots have lost what was in them: who has a slot fails, and the device tier is empty. Between
        steps, when nobody else has pinned anything."""
        assert self.in_flight is None, "a step is in flight"
        for live in self.live.values():
            self.holdings.unpin(live)
            if live.slot is not None:
                self._end(live, Outcome.FAILED)
            if live.stage is Stage.SAVING:  # there is nothing left to save
                live.stage = Stage.DECODING
        self.pool.clear(now)
        self._sweep()

    def report(self) -> Report:
        """What there is to tell since the last report."""
        report = Report(tuple(self._tokens), tuple(self._ended), tuple(self._published))
        self._tokens, self._ended, self._published = [], [], []
        return report

    # Commits

    def _restored(self, live: Live, failed: bool) -> None:
        self.holdings.unpin(live)
        if failed:
            self._end(live, Outcome.FAILED)

    def _computed(self, chunk: Chunk, results: Results, now: float) -> None:
        live = self.live[chunk.id]
        if chunk.id in results.failed:
            for snapshot in chunk.snapshots:
                self.pool.pages.give_back(snapshot.pages)
            self._end(live, Outcome.FAILED)
            return
        for snapshot in chunk.snapshots:
            self._publish(live, snapshot, now)
        live.computed = chunk.start + len(chunk.tokens)
        if chunk.samples:
            live.stage = Stage.DECODING
            self._sampled(live, results.sampled[chunk.id], now)

    def _sampled(self, live: Live, sampled: Sampled, now: float, drafts: tuple[int, ...] = ()) -> None:
        """Takes tokens; with the last one the request ends, and its state is saved where there is room."""
        if live.outcome:
            return
        tokens = *drafts[: sampled.accepted], sampled.token
        live.extend(tokens)
        self._tokens += [(live.request.id, token) for token in tokens]
        if not sampled.last and live.generated < live.request.max_new_tokens:
            return
        self._end(live, Outcome.FINISHED)
        self._save(live, now)

    def _save(self, live: Live, now: float) -> None:
        """The state of who has ended is saved with the next step, where that is wanted and there is room."""
        wanted = Kind.GENERATION_END in self.creation.kinds and live.computed
        if wanted and not self.pool.holds(live.request.namespace, live.tokens[: live.computed]):
            pages = self.holdings.state_pages(now)
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
            self.pool.pages.give_back(snapshot.pages)
            key = None
        else:
            key = self._publish(live, snapshot, now)
        live.stage = Stage.DECODING
        if not live.outcome:
            self.holdings.back(live)
            self.holdings.pin(live, key)

    def _publish(self, live: Live, snapshot: Snapshot, now: float) -> bytes | None:
        tokens = live.tokens[: snapshot.boundary]
        key = self.pool.publish(
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
                self.holdings.release(live)
                del self.live[live.request.id]
