"""Memory at addresses that vector loads and accelerator runtimes take as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer.objects import Bytes

ALIGNMENT = 64
"""Bytes: a cache line, and what XLA asks for to use host memory without a copy."""


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def is_aligned(array: np.ndarray) -> bool:
    """Whether its first byte is at a multiple of the alignment."""
    return array.ctypes.data % ALIGNMENT == 0


def empty(nbytes: int) -> Bytes:
    """Fresh aligned bytes, [nbytes], not set to anything."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


def join(pieces: Sequence[Bytes]) -> Bytes:
    """A copy of pieces one after the other, in fresh aligned bytes."""
    whole, end = empty(sum(piece.nbytes for piece in pieces)), 0
    for piece in pieces:
        whole[end : end + piece.nbytes] = piece
        end += piece.nbytes
    return whole
