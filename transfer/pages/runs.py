"""Pages that follow each other on both sides, as one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Pages `local .. local + count - 1` here that go to `remote .. remote + count - 1` there."""

    local: int
    remote: int
    count: int


def coalesce(local: Sequence[int], remote: Sequence[int]) -> list[Run]:
    """The fewest runs that move every page `local[i]` to `remote[i]`, in no order that matters.

    Args:
        local, remote: page numbers, as many here as there; the remote ones are distinct.
    """
    if not len(local):
        return []
    here, there = np.asarray(local, np.int64), np.asarray(remote, np.int64)
    order = np.lexsort((here, there - here))  # what can be one run has one distance
    here, there = here[order], there[order]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(here) != 1) | (np.diff(there) != 1)]))
    counts = np.diff(np.append(first, len(here)))
    return [Run(*run) for run in zip(here[first].tolist(), there[first].tolist(), counts.tolist())]
