"""Objects cut into what one library call writes, so that the next bytes are copied while the last ones are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from transfer.mooncake.settings import MIB
from transfer.objects import Bytes, Item

STAGED = 8 * MIB
"""Most bytes that are copied for one library call: two calls' stay in the cache from the copy until they are sent, and
the time of a call itself is little beside theirs."""


class Span(NamedTuple):
    """Bytes of an object that lie side by side in memory.

    Attributes:
        item: whose they are, by number.
        offset: where they go in it.
        raw: they.
        staged: they are copied first.
    """

    item: int
    offset: int
    raw: Bytes
    staged: bool


class Runs(NamedTuple):
    """What follows each other in an object from `offset` on, as (address, bytes)."""

    offset: int
    runs: list[tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Of all runs."""
        return sum(nbytes for _, nbytes in self.runs)


def strides(items: Sequence[Item], is_staged: Callable[[Bytes], bool]) -> list[list[Span]]:
    """Every byte of the objects once, in order. A stride ends where `STAGED` bytes of it are to be copied."""
    found: list[list[Span]] = [[]]
    room = STAGED
    for i, item in enumerate(items):
        offset = 0
        for piece in item.pieces:
            staged, start = is_staged(piece), 0
            while start < piece.nbytes:
                if staged and not room:
                    found.append([])
                    room = STAGED
                raw = piece[start : start + room] if staged else piece
                found[-1].append(Span(i, offset, raw, staged))
                room -= raw.nbytes if staged else 0
                start += raw.nbytes
                offset += raw.nbytes
    return found


def staged_nbytes(stride: Sequence[Span]) -> int:
    """How many bytes of it are copied."""
    return sum(span.raw.nbytes for span in stride if span.staged)


def stage(stride: Sequence[Span], room: Bytes) -> dict[int, Runs]:
    """Copies what is to be copied to the begin of `room`. Where each object's bytes lie then."""
    copies = [span.raw for span in stride if span.staged]
    if copies:
        np.concatenate(copies, out=room[: staged_nbytes(stride)])
    found: dict[int, Runs] = {}
    end = 0
    for span in stride:
        raw = span.raw
        if span.staged:
            raw, end = room[end : end + raw.nbytes], end + raw.nbytes
        extend(found.setdefault(span.item, Runs(span.offset, [])).runs, raw)
    return found


def extend(runs: list[tuple[int, int]], piece: Bytes) -> None:
    """Adds a piece to runs of (address, bytes): to the last one if it begins where that ends."""
    if not piece.nbytes:
        return
    address = piece.ctypes.data
    if runs and sum(runs[-1]) == address:
        runs[-1] = (runs[-1][0], runs[-1][1] + piece.nbytes)
    else:
        runs.append((address, piece.nbytes))
