"""Timing of calls that only enqueue work: many are enqueued, then one waits, and all contenders take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.timing import Timing

SAMPLE_S = 0.02
MOST_CALLS = 200


class Call(NamedTuple):
    """Something to time.

    Attributes:
        enqueue: starts the work and returns what to wait for.
        wait: returns when that is done, and with it everything enqueued before.
    """

    enqueue: Callable[[], Any]
    wait: Callable[[Any], object]


def time_calls(
    calls: Mapping[str, Call], *, rounds: int, log: Callable[[str], None] = lambda text: None
) -> dict[str, Timing]:
    """Times contenders in interleaved rounds.

    Each is called twice untimed (whatever compiles or tunes, does so there). A sample is as many calls as take about
    20 ms, enqueued one behind the other and waited for together: what one call costs when the device is kept busy.

    Args:
        calls: by name.
        rounds: samples of each.
        log: told who is at work.

    Returns:
        Seconds a call, a sample each, by name.
    """
    counts = {}
    for name, call in calls.items():
        log(name)
        call.wait(call.enqueue())
        counts[name] = min(MOST_CALLS, math.ceil(SAMPLE_S / max(_sample(call, 1), 1e-6)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in list(calls)[:: 1 if index % 2 == 0 else -1]:
            taken[name].append(_sample(calls[name], counts[name]))
    return {name: Timing(tuple(seconds)) for name, seconds in taken.items()}


def _sample(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count - 1):
        call.enqueue()
    call.wait(call.enqueue())
    return (time.perf_counter() - start) / count
