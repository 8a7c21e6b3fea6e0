"""What is held of one prompt, and where: the index's answer, a remote store's answer, or both as one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.index import Index, Match
from cache.tier import ALL_TIERS
from cache.tokens import Tokens


class Rows(NamedTuple):
    """Latent rows `[start, stop)` of a prompt, whole pages, are in each of `tiers`."""

    start: int
    stop: int
    tiers: int


class Seen(NamedTuple):
    """A boundary of a prompt.

    Attributes:
        boundary: tokens before it.
        tiers: those that hold its checkpoint; 0 while it is only remembered.
        key: its name, where that is known.
    """

    boundary: int
    tiers: int
    key: bytes | None = None


class Prompt(NamedTuple):
    """A prompt that was matched, without media.

    Attributes:
        namespace: digest.
        data: the bytes of its token ids.
    """

    namespace: bytes
    data: bytes

    def begins(self, namespace: bytes, tokens: NDArray[Any]) -> bool:
        """Whether it begins with these tokens."""
        same = namespace == self.namespace and tokens.dtype == np.int32 and tokens.ndim == 1
        return same and self.data.startswith(np.ascontiguousarray(tokens).data)


class View(NamedTuple):
    """What is known of one prompt.

    Attributes:
        length: tokens that it shares with what was there before.
        rows: where its latents are, in order, without overlaps; what lies between is nowhere.
        boundaries: its boundaries, shallow to deep.
        prompt: itself, where a store was asked for it and it is short enough.
    """

    length: int = 0
    rows: tuple[Rows, ...] = ()
    boundaries: tuple[Seen, ...] = ()
    prompt: Prompt | None = None

    def covered(self, tiers: int = ALL_TIERS) -> int:
        """Latent rows from the first on that are in any of these tiers without a gap."""
        stop = 0
        for rows in self.rows:
            if rows.start > stop or not rows.tiers & tiers:
                break
            stop = rows.stop
        return stop


def view(index: Index, tokens: Tokens, match: Match | None = None, prompt: Prompt | None = None) -> View:
    """What an index knows of a prompt. `match` is its match of these tokens, where the caller has it; `prompt` becomes
    the view's own."""
    match, page = match or index.match(tokens), index.page
    rows, boundaries, start, tiers, row = [], [], 0, 0, 0
    for node in match.nodes:
        stop = node.stop if node.stop <= match.length else match.length
        if node.rows != tiers and stop // page * page > row:
            rows.append(Rows(start, row, tiers))
            start, tiers = row, node.rows
        row = stop // page * page
        if node.key is not None and node.stop == stop:
            boundaries.append(Seen(stop, node.states, node.key))
    rows.append(Rows(start, row, tiers))
    return View(match.length, _joined(rows), tuple(boundaries), prompt)


def merge(a: View, b: View) -> View:
    """The union of two views of one prompt: of their rows and of their boundaries, each as a set."""
    edges = sorted({edge for rows in (*a.rows, *b.rows) for edge in rows[:2]})
    rows = [
        Rows(start, stop, _tiers_at(a.rows, start) | _tiers_at(b.rows, start))
        for start, stop in pairwise(edges)
    ]
    found = {seen.boundary: seen for seen in a.boundaries}
    for seen in b.boundaries:
        mine = found.get(seen.boundary, seen)
        found[seen.boundary] = Seen(seen.boundary, mine.tiers | seen.tiers, mine.key or seen.key)
    boundaries = tuple(found[boundary] for boundary in sorted(found))
    return View(max(a.length, b.length), _joined(rows), boundaries)


def _tiers_at(spans: tuple[Rows, ...], row: int) -> int:
    return next((rows.tiers for rows in spans if rows.start <= row < rows.stop), 0)


def _joined(spans: list[Rows]) -> tuple[Rows, ...]:
    """Neighbours in the same tiers as one, and none that is empty or nowhere."""
    joined: list[Rows] = []
    for rows in spans:
        if joined and joined[-1].stop == rows.start and joined[-1].tiers == rows.tiers:
            joined[-1] = joined[-1]._replace(stop=rows.stop)
        elif rows.tiers and rows.start < rows.stop:
            joined.append(rows)
    return tuple(joined)
