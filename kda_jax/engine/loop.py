"""The loop that joins the scheduler with the device: one step after another, and what is told of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cache.tier import Tier
from kda_jax.engine.execution import Choice, Execution, MemoryLost
from kda_jax.engine.explain import name
from kda_jax.engine.request import Outcome, Request, Stage
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.statistics import Statistics, Tally
from kda_jax.engine.stream import Finished, Reason, Stream, Times, Token, Usage
from kda_jax.engine.work import Ended, Results, Work

REMEMBERED = 20_000
"""Boundaries without bytes that are remembered at least, and evictions whose time is."""


@dataclass(slots=True)
class Asked:
    """A request on its way.

    Attributes:
        request: as the scheduler has it.
        stream: where its tokens go.
        submitted: when it came, in seconds.
        started: when its first work began.
        first: when its first token was there.
        generated: tokens so far, a stop token among them.
        stopped: whether the last of them was a stop token.
        last: when its last token was there.
        cached: prompt tokens that were restored, by tier.
        error: what went wrong.
    """

    request: Request
    stream: Stream
    submitted: float
    started: float | None = None
    first: float | None = None
    last: float | None = None
    generated: int = 0
    stopped: bool = False
    cached: dict[str, int] = field(default_factory=dict)
    error: str | None = None


class Loop:
    """Requests in the scheduler, and their streams. One thread calls."""

    def __init__(
        self,
        scheduler: Scheduler,
        execution: Execution,
        choices: dict[int, Choice],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            scheduler: says what is computed.
            execution: computes it.
            choices: the same that `execution` looks into.
            clock: seconds.
        """
        self.scheduler, self.execution, self.clock = scheduler, execution, clock
        self._choices = choices
        self.asked: dict[int, Asked] = {}
        self.tally = Tally()
        self.evicted: dict[bytes, float] = {}
        self._held: set[bytes] = set()
        self._evictions = 0

    def submit(self, request: Request, stream: Stream, choice: Choice, submitted: float) -> None:
        """Takes a request."""
        self.asked[request.id] = Asked(request, stream, submitted)
        self._choices[request.id] = choice
        try:
            self.scheduler.submit(request)
        except Exception as error:
            self._fail(request.id, f"{type(error).__name__}: {error}")

    def cancel(self, id: int) -> None:
        """Ends a request, if it has not ended."""
        self.scheduler.cancel(id)
        self._tell()

    def cancel_all(self) -> None:
        """Ends every request."""
        for id in list(self.asked):
            self.cancel(id)

    def retire_all(self) -> None:
        """Ends every request; what has been computed for them becomes checkpoints in the next step."""
        for id in list(self.asked):
            self.scheduler.retire(id, self.clock())
        self._tell()

    def turn(self) -> float | None:
        """One step.

        Returns:
            when the next one is due if nothing happens before: now if there is more to do, None for never.
        """
        work = self.scheduler.step(self.clock())
        self._tell()
        start = self.clock()
        self._note(work)
        self._execute(work)
        if not work.empty:
            self.tally.step.add(self.clock() - start)
            return self.clock()
        deadlines = [live.request.deadline for live in self.scheduler.live.values()]
        return min((at for at in deadlines if at is not None), default=None)

    def statistics(self) -> Statistics:
        """All in numbers."""
        scheduler, tally = self.scheduler, self.tally
        store, pages = scheduler.pool.holder.store, scheduler.pool.pages
        stages = Counter(live.stage for live in scheduler.live.values())
        numbers = store.stats()
        return Statistics(
            waiting=stages[Stage.WAITING],
            waiting_tokens=scheduler.holdings.queued,
            loading=stages[Stage.LOADING],
            running=sum(stages[stage] for stage in (Stage.PREFILLING, Stage.DECODING, Stage.SAVING)),
            slots=scheduler.holdings.slots.num_slots - 1,
            pages=pages.capacity,
            pages_free=pages.free,
            pages_cached=numbers.tiers[Tier.DEVICE].nbytes // pages.page_nbytes,
            tiers={name(tier): full for tier, full in numbers.tiers.items()},
            remembered=numbers.remembered,
            ended=dict(tally.ended),
            computed_tokens=tally.computed,
            restored_tokens=dict(tally.restored),
            generated_tokens=tally.generated,
            first_token=tally.first_token.times(),
            per_token=tally.per_token.times(),
            step=tally.step.times(),
            evicted=numbers.counts.evicted,
            lost=numbers.counts.lost,
            memory_lost=tally.memory_lost,
        )

    def end_all(self, error: str) -> None:
        """Every request fails: nothing computes any more."""
        for id in list(self.asked):
            self._fail(id, error)

    def _execute(self, work: Work) -> None:
        parts = (*work.snapshots, *work.restores, *work.chunks, *work.rows)
        try:
            results, lost = self.execution.run(work), None
        except MemoryLost as error:
            results, lost = Results({}, frozenset(part.id for part in parts)), str(error)
        for id, error in self.execution.errors.items():
            if id in self.asked:
                self.asked[id].error = error
        self.scheduler.done(work, results, self.clock())
        if lost is not None:
            self._memory_lost(lost)
        self._tell()

    def _memory_lost(self, error: str) -> None:
        """Who was running fails, and the others begin anew in another memory."""
        for asked in self.asked.values():
            asked.error = f"the device's memory was lost: {error}"
        self.tally.memory_lost += 1
        self.scheduler.memory_lost(self.clock())
        self.execution.reset()

    def _note(self, work: Work) -> None:
        """Who starts, and with what."""
        now = self.clock()
        for restore in work.restores:
            self._restored(restore.id, {"device": restore.boundary})
        for part in (*work.restores, *work.chunks, *work.loads):
            self._starts(part.id, now)
        self.tally.computed += sum(len(chunk.tokens) for chunk in work.chunks)
        self.tally.generated += len(work.rows) + sum(chunk.samples for chunk in work.chunks)

    def _restored(self, id: int, tokens: Mapping[str, int]) -> None:
        """A request goes on from a checkpoint whose latents, so many tokens of them, were in these tiers."""
        self.tally.restored.update(tokens)
        asked = self.asked.get(id)
        if (
            asked and not asked.generated
        ):  # one that was preempted while it generated has more than its prompt
            asked.cached = dict(tokens)

    def _starts(self, id: int, now: float) -> None:
        asked = self.asked.get(id)
        if asked and asked.started is None:
            asked.started = now

    def _tell(self) -> None:
        """What the scheduler has to report, to those whom it concerns."""
        report = self.scheduler.report()
        for id, token in report.tokens:
            self._token(id, token)
        for ended in report.ended:
            self._ended(ended)
        self._held.update(report.published)
        self._remember()

    def _remember(self) -> None:
        """Notes what is held no longer, and forgets what was used longest ago."""
        holder = self.scheduler.pool.holder
        if holder.store.counts.evicted != self._evictions:
            prompts, self._evictions = holder.store.prompts, holder.store.counts.evicted
            gone = [key for key in self._held if key not in prompts.places or not prompts.node(key).states]
            self._held.difference_update(gone)
            self.evicted.update(dict.fromkeys(gone, self.clock()))
            while len(self.evicted) > REMEMBERED:
                del self.evicted[next(iter(self.evicted))]
        if len(holder.store.prompts.places) > 2 * REMEMBERED:
            holder.update(lambda store: store.forget(REMEMBERED))

    def _token(self, id: int, number: int) -> None:
        asked = self.asked[id]
        now = self.clock()
        asked.generated += 1
        if asked.first is None:
            asked.first = now
            self.tally.first_token.add(now - asked.submitted)
        else:
            assert asked.last is not None
            self.tally.per_token.add(now - asked.last)
        asked.last = now
        asked.stopped = number in self._choices[id].stop_tokens
        if not asked.stopped:
            asked.stream.put(self.execution.tokens.get(id, Token(number)))

    def _ended(self, ended: Ended) -> None:
        asked = self.asked.pop(ended.id)
        del self._choices[ended.id]
        reason: Reason = "stop" if asked.stopped else "length"
        if ended.outcome is not Outcome.FINISHED:
            reason = _REASONS[ended.outcome]
        failed = ended.outcome is Outcome.FAILED
        usage = Usage(len(asked.request.tokens), asked.generated, asked.cached)
        self.tally.ended[ended.outcome.value] += 1
        asked.stream.end(
            Finished(
                ended.outcome,
                reason,
                asked.stream.tokens(),
                usage,
                (asked.error or "unknown") if failed else None,
                Times(
                    None if asked.started is None else asked.started - asked.submitted,
                    None if asked.first is None else asked.first - asked.submitted,
                    self.clock() - asked.submitted,
                ),
            )
        )

    def _fail(self, id: int, error: str) -> None:
        self.asked[id].error = error
        self._ended(Ended(id, Outcome.FAILED))


_REASONS: dict[Outcome, Reason] = {
    Outcome.CANCELLED: "cancelled",
    Outcome.EXPIRED: "expired",
    Outcome.FAILED: "failed",
}
