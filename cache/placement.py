"""Which checkpoints a prefill makes on its way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cache.plan import Limits, Missing, ResumePlan
from cache.retention.protocol import Creation, Kind


class Placed(NamedTuple):
    """A checkpoint to make at a boundary, and why."""

    boundary: int
    kind: Kind


def place(
    resumed: ResumePlan, num_tokens: int, limits: Limits, creation: Creation, marks: Iterable[int] = ()
) -> tuple[Placed, ...]:
    """The boundaries of a prefill, shallow to deep.

    All lie beyond the resume boundary, on the grid and at most at the prompt's end; those before the end lie beyond all
    that was known of the prompt. A prompt that ends on the grid gets one more a step before its end, so that the same
    prompt, which must compute its last token, can resume too.

    Args:
        resumed: the plan of this prefill.
        num_tokens: length of its prompt.
        limits: grid, and how many checkpoints or bytes of state there may be. What does not fit is left out from the
            end of this order: prompt end, branch points, missing ones, marks, those before the end, intervals, the
            step before the end; among equals the shallower.
        creation: the kinds that are wanted, and the interval.
        marks: the caller's own boundaries: end of the system prompt, of the tools, of a turn.
    """
    end, steps = limits.floor(num_tokens), range(0)
    if creation.interval:
        steps = range(creation.interval, num_tokens + 1, creation.interval)
    wanted = [
        (end, Kind.PROMPT_END),
        *sorted(resumed.missing[::-1], key=_is_no_branch),
        *[(limits.floor(mark), Kind.MARK) for mark in sorted(marks, reverse=True)],
        *[(limits.floor(end - tokens), Kind.BEFORE_END) for tokens in sorted(creation.before_end)],
        *[(limits.floor(step), Kind.INTERVAL) for step in reversed(steps)],
        (limits.floor(num_tokens - 1), Kind.PROMPT_END),
    ]
    known = resumed.missing[-1].boundary if resumed.missing else resumed.boundary
    held, chosen = {resumed.boundary, *resumed.held}, {}
    for boundary, kind in wanted:
        start = known if kind is Kind.BEFORE_END else resumed.boundary
        if start < boundary <= end and boundary not in held and kind in creation.kinds:
            chosen.setdefault(boundary, Placed(boundary, kind))
    return tuple(sorted(list(chosen.values())[: _allowed(limits)]))


def _is_no_branch(missing: Missing) -> bool:
    return missing.kind is not Kind.BRANCH


def _allowed(limits: Limits) -> int | None:
    """How many checkpoints the limits allow, None for any number."""
    if limits.nbytes is None or not limits.state_nbytes:
        return limits.most
    by_bytes = limits.nbytes // limits.state_nbytes
    return by_bytes if limits.most is None else min(limits.most, by_bytes)
