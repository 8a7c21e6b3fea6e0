"""Interleaved timing: every contender runs in every round, so that a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Something to time.

    Attributes:
        name: key of its figures in the result of `race`.
        call: the timed act. It gets what `prepare` returned (None without one) and must return only when the
            work is done (`jax.block_until_ready`).
        prepare: runs before each call, outside the clock; for example copies a state that the call donates.
    """

    name: str
    call: Call
    prepare: Callable[[], object] | None = None

    def timed(self) -> float:
        """One call's duration in seconds."""
        prepared = self.prepare() if self.prepare is not None else None
        start = time.perf_counter()
        self.call(prepared)
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations of one contender's timed calls, in seconds, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def rounds(self) -> int:
        return len(self.seconds)

    @property
    def min_ms(self) -> float:
        return 1e3 * min(self.seconds)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    def figures(self, prefix: str) -> dict[str, float | int]:
        """`{prefix}_ms` (the minimum), `{prefix}_median_ms`, `{prefix}_rounds`: the keys of a JSON record."""
        return {
            f"{prefix}_ms": self.min_ms,
            f"{prefix}_median_ms": self.median_ms,
            f"{prefix}_rounds": self.rounds,
        }


def speedup(ours: Timing, peer: Timing) -> dict[str, float]:
    """The peer's time over ours, by minima and by medians; above 1, ours is faster."""
    return {"min": peer.min_ms / ours.min_ms, "median": peer.median_ms / ours.median_ms}


def race(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    budget_s: float,
    min_rounds: int = 2,
    settle_s: float = 0.005,
    warm: bool = False,
    on_call: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time contenders in interleaved rounds.

    Each contender is called once untimed (whatever compiles, compiles there). All of them run in the first
    round, which tells how long each takes: one that would need more than `budget_s` for all rounds gets
    fewer, at least `min_rounds`, spread evenly over the race. Every second round runs in the opposite order,
    so that nobody always follows the same neighbour.

    Args:
        contenders: what to time; names must differ.
        rounds: timed calls of a contender that fits its budget.
        budget_s: seconds that one contender's timed calls may take together.
        min_rounds: timed calls of the slowest contender.
        settle_s: pause before each call, in seconds, in which the last contender's worker threads go to
            sleep.
        warm: every contender has been called already: leave the untimed call out.
        on_call: told the contender's name after every call (for a progress bar).

    Returns:
        A `Timing` by name.

    Raises:
        ValueError: two contenders share a name, or not 1 <= `min_rounds` <= `rounds`.
    """
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise ValueError(f"contenders must have different names; got {names}")
    if not 1 <= min_rounds <= rounds:
        raise ValueError(f"need 1 <= min_rounds <= rounds; got {min_rounds=}, {rounds=}")

    def timed(contender: Contender) -> float:
        time.sleep(settle_s)
        seconds = contender.timed()
        if on_call is not None:
            on_call(contender.name)
        return seconds

    if not warm:
        for contender in contenders:
            timed(contender)
    gc.collect()
    taken = {contender.name: [timed(contender)] for contender in contenders}
    affordable = {name: int(budget_s / max(seconds[0], 1e-9)) for name, seconds in taken.items()}
    wanted = {name: max(min_rounds, min(rounds, count)) for name, count in affordable.items()}
    for index in range(1, rounds):
        for contender in contenders if index % 2 == 0 else reversed(contenders):
            count = wanted[contender.name] - 1
            if index * count // (rounds - 1) > (index - 1) * count // (rounds - 1):
                taken[contender.name].append(timed(contender))
    return {name: Timing(tuple(seconds)) for name, seconds in taken.items()}
