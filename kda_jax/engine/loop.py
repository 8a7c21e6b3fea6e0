"""The loop that joins the scheduler with the device: one step after another, and what is told of each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from cache.tier import Tier
from cache.view import View
from kda_jax.engine.asked import Asked
from kda_jax.engine.execution import Choice, Execution, MemoryLost
from kda_jax.engine.explain import name
from kda_jax.engine.loading import Read
from kda_jax.engine.lookup import Drafter
from kda_jax.engine.numbers import numbers
from kda_jax.engine.request import Outcome, Request
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.slower import Slower
from kda_jax.engine.statistics import Statistics, Tally
from kda_jax.engine.stream import Stream, Token
from kda_jax.engine.work import Ended, Load, Results, Work

REMEMBERED = 20_000
"""Boundaries without bytes that are remembered at least, and evictions whose time is."""
LOOKS = 10.0
"""Seconds between looks for what was evicted: it takes a look at every checkpoint."""


class Loop:
    """Requests in the scheduler, and their streams. One thread calls."""

    def __init__(
        self,
        scheduler: Scheduler,
        execution: Execution,
        choices: dict[int, Choice],
        slower: Slower,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            scheduler: says what is computed.
            execution: computes it.
            choices: the same that `execution` looks into.
            slower: the tiers behind the device.
            clock: seconds.
        """
        self.scheduler, self.execution, self.clock = scheduler, execution, clock
        self._choices, self._slower = choices, slower
        self._searching: dict[int, float] = {}
        self.asked: dict[int, Asked] = {}
        self.tally = Tally()
        self.evicted: dict[bytes, float] = {}  # when it was seen, by key
        self._held: set[bytes] = set()
        self._evictions, self._looked, self._remembered = 0, self.clock(), REMEMBERED

    def submit(
        self, request: Request, stream: Stream, choice: Choice, drafter: Drafter | None, submitted: float
    ) -> None:
        """Takes a request."""
        self.asked[request.id] = Asked(request, stream, submitted, drafter)
        self._choices[request.id] = choice
        patience = self._slower.patience(request)
        if patience:
            self._searching[request.id] = self.clock() + patience
            self._slower.search(request, patience, lambda view: self._found(request.id, view))
        else:
            self.scheduler.submit(request, drafter)

    def cancel(self, id: int) -> None:
        """Ends a request, if it has not ended."""
        if self._searching.pop(id, None) is not None:
            self._ended(Ended(id, Outcome.CANCELLED))
        self.scheduler.cancel(id)
        self._tell()

    @property
    def waiting_tokens(self) -> int:
        """Tokens of requests without a slot."""
        searching = sum(len(self.asked[id].request.tokens) for id in self._searching)
        return searching + self.scheduler.holdings.queued

    @property
    def busy(self) -> bool:
        """Whether a request has not ended, or a checkpoint is on its way."""
        return bool(self.asked or self.scheduler.live or self._slower.writing.busy)

    def cancel_all(self) -> None:
        """Ends every request."""
        for id in list(self.asked):
            self.cancel(id)

    def retire_all(self) -> None:
        """Ends every request; what has been computed for them becomes checkpoints in the next step."""
        for id in list(self._searching):
            self.cancel(id)
        for id in list(self.asked):
            self.scheduler.retire(id, self.clock())
        self._tell()

    def turn(self) -> float | None:
        """One step.

        Returns:
            when the next one is due if nothing happens before: now if there is more to do, None for never.
        """
        self._give_up_searches()
        work = self.scheduler.step(self.clock(), self._slower.rates.beside)
        self._tell()
        start = self.clock()
        self._note(work)
        self._execute(work)
        now = self.clock()
        if not work.empty:
            self.tally.step.add(now - start)
            tokens = sum(len(chunk.tokens) for chunk in work.chunks)
            self._slower.rates.step(tokens, len(work.rows), now - start)
        copied = self._slower.writing.copying.step(self.execution.memory)
        if not work.empty or copied:  # what was pinned for a copy may be the room that a request waits for
            return now
        deadlines = (asked.request.deadline for asked in self.asked.values())
        return min((at for at in (*deadlines, *self._searching.values()) if at is not None), default=None)

    def statistics(self) -> Statistics:
        """All in numbers."""
        waiting = len(self._searching), self.waiting_tokens
        return numbers(self.scheduler, self.tally, self._slower, *waiting)

    def end_all(self, error: str) -> None:
        """Every request fails: nothing computes any more."""
        for id in list(self.asked):
            self._fail(id, error)

    def _found(self, id: int, view: View | None) -> None:
        """A search is over, in time or not."""
        if self._searching.pop(id, None) is not None:
            asked = self.asked[id]
            self.scheduler.submit(dataclasses.replace(asked.request, remote=view), asked.drafter)

    def _give_up_searches(self) -> None:
        """Who has waited long enough for a search goes on without; whose deadline has passed has ended."""
        now = self.clock()
        for id, until in list(self._searching.items()):
            deadline = self.asked[id].request.deadline
            if deadline is not None and deadline <= now:
                del self._searching[id]
                self._ended(Ended(id, Outcome.EXPIRED))
            elif until <= now:
                self._found(id, None)

    def _loaded(self, load: Load, read: Read) -> None:
        """A load is over: what it brought is written, unless the request has ended since."""
        live, lost = self.scheduler.live[load.id], read.lost
        if not lost and not live.outcome:
            try:
                self.execution.write(load, read)
                self._restored(load.id, _by_tier(load, self.scheduler.sizes.rows))
            except MemoryLost as error:
                self.scheduler.loaded(load.id, load.attempt, [], self.clock())
                self._memory_lost(str(error))
                return
            except Exception:
                lost = [(load.tier, None)]
        self.scheduler.loaded(load.id, load.attempt, lost, self.clock())
        self._tell()

    def _execute(self, work: Work) -> None:
        parts = (*work.snapshots, *work.zeros, *work.restores, *work.chunks, *work.rows)
        for load in work.loads:
            self._slower.load(load, self.scheduler.live[load.id].request.namespace, self._loaded)
        try:
            results, lost = self.execution.run(work), None
        except MemoryLost as error:
            results, lost = Results({}, frozenset(part.id for part in parts)), str(error)
        for id, error in self.execution.errors.items():
            if id in self.asked:
                self.asked[id].error = error
        for row in work.rows:
            if (sampled := results.sampled.get(row.id)) and (asked := self.asked.get(row.id)):
                asked.drafted += len(row.drafts)
                asked.accepted += sampled.accepted
                self.tally.drafted += len(row.drafts)
                self.tally.accepted += sampled.accepted
        self.scheduler.done(work, results, self.clock())
        if lost is not None:
            self._memory_lost(lost)
        self._tell()

    def _memory_lost(self, error: str) -> None:
        """Who was running fails, and the others begin anew in another memory."""
        for asked in self.asked.values():
            asked.error = f"the device's memory was lost: {error}"
        self.tally.memory_lost += 1
        self._slower.writing.copying.abandon()
        self.scheduler.memory_lost(self.clock())
        self.execution.reset()
        self._tell()

    def _note(self, work: Work) -> None:
        """Who starts, and with what."""
        now = self.clock()
        for restore in work.restores:
            self._restored(restore.id, {"device": restore.boundary})
        for part in (*work.restores, *work.chunks, *work.loads):
            if asked := self.asked.get(part.id):
                asked.starts(now)
        self.tally.computed += sum(len(chunk.tokens) for chunk in work.chunks)

    def _restored(self, id: int, tokens: Mapping[str, int]) -> None:
        """A request goes on from a checkpoint whose latents, so many tokens of them, were in these tiers."""
        self.tally.restored.update(tokens)
        if asked := self.asked.get(id):
            asked.restored(tokens)

    def _tell(self) -> None:
        """What the scheduler has to report, to those whom it concerns."""
        report = self.scheduler.report()
        for id, number in report.tokens:
            told = self.execution.tokens.get(id)
            self._token(id, number, told.pop(0) if told else None)
        for ended in report.ended:
            self._ended(ended)
        for key in report.published:
            self._slower.writing.add(key)
        self._held.update(report.published)
        self._remember()

    def note_evictions(self) -> None:
        """Looks what is held no longer."""
        holder, self._looked = self.scheduler.pool.holder, self.clock()
        if holder.store.counts.evicted == self._evictions:
            return
        prompts, self._evictions = holder.store.prompts, holder.store.counts.evicted
        gone = [key for key in self._held if key not in prompts.places or not prompts.node(key).states]
        self._held.difference_update(gone)
        self.evicted.update(dict.fromkeys(gone, self._looked))
        while len(self.evicted) > REMEMBERED:
            del self.evicted[next(iter(self.evicted))]

    def _remember(self) -> None:
        """Looks from time to time what is held no longer, and forgets what was used longest ago."""
        holder = self.scheduler.pool.holder
        if self.clock() > self._looked + LOOKS:
            self.note_evictions()
        if len(holder.store.prompts.places) > self._remembered + REMEMBERED:
            store = holder.update(lambda store: store.forget(REMEMBERED))
            self._remembered = max(REMEMBERED, len(store.prompts.places))

    def _token(self, id: int, number: int, told: Token | None) -> None:
        asked = self.asked[id]
        now = self.clock()
        asked.generated += 1
        self.tally.generated += 1
        if asked.first is None:
            asked.first = now
            self.tally.first_token.add(now - asked.submitted)
        else:
            assert asked.last is not None
            self.tally.per_token.add(now - asked.last)
        asked.last = now
        asked.stopped = number in self._choices[id].stop_tokens
        if not asked.stopped:
            asked.stream.put(told or Token(number))

    def _ended(self, ended: Ended) -> None:
        asked = self.asked.pop(ended.id)
        del self._choices[ended.id]
        self.tally.ended[ended.outcome.value] += 1
        asked.stream.end(asked.finished(ended.outcome, self.clock()))

    def _fail(self, id: int, error: str) -> None:
        self.asked[id].error = error
        self._ended(Ended(id, Outcome.FAILED))


def _by_tier(load: Load, rows: int) -> dict[str, int]:
    """Tokens that a load restores, by the tier of their latents; rows of an unfinished page come with the state."""
    tokens = Counter(name(source.tier) for source in load.pages)
    restored = {tier: count * rows for tier, count in tokens.items()}
    here, inside = load.boundary // rows - len(load.pages), load.boundary % rows
    for tier, count in ((Tier.DEVICE, here * rows), (load.tier, inside)):
        if count:
            restored[name(tier)] = restored.get(name(tier), 0) + count
    return restored
