"""A request on its way: what was asked, when what happened to it, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kda_jax.engine.lookup import Drafter
from kda_jax.engine.request import Outcome, Request
from kda_jax.engine.stream import Finished, Reason, Stream, Times, Usage

_REASONS: dict[Outcome, Reason] = {
    Outcome.CANCELLED: "cancelled",
    Outcome.EXPIRED: "expired",
    Outcome.FAILED: "failed",
}


@dataclass(slots=True)
class Asked:
    """A request on its way.

    Attributes:
        request: as the scheduler has it.
        stream: where its tokens go.
        submitted: when it came, in seconds.
        drafter: guesses how it goes on.
        started: when its first work began.
        first: when its first token was there.
        generated: tokens so far, a stop token among them.
        stopped: whether the last of them was a stop token.
        last: when its last token was there.
        cached: prompt tokens that were restored, by tier.
        drafted, accepted: tokens that were guessed, and those that were right.
        error: what went wrong.
    """

    request: Request
    stream: Stream
    submitted: float
    drafter: Drafter | None
    started: float | None = None
    first: float | None = None
    last: float | None = None
    generated: int = 0
    stopped: bool = False
    cached: dict[str, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    error: str | None = None

    def restored(self, tokens: Mapping[str, int]) -> None:
        """It goes on from a checkpoint; one that was preempted while it generated has more than its prompt."""
        if not self.generated:
            self.cached = dict(tokens)

    def starts(self, now: float) -> None:
        """Its work begins, or goes on."""
        if self.started is None:
            self.started = now

    def finished(self, outcome: Outcome, now: float) -> Finished:
        """How it ended."""
        reason: Reason = "stop" if self.stopped else "length"
        return Finished(
            outcome,
            _REASONS.get(outcome, reason),
            self.stream.tokens(),
            Usage(len(self.request.tokens), self.generated, self.cached, self.drafted, self.accepted),
            (self.error or "unknown") if outcome is Outcome.FAILED else None,
            Times(
                None if self.started is None else self.started - self.submitted,
                None if self.first is None else self.first - self.submitted,
                now - self.submitted,
            ),
        )
