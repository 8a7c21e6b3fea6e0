"""One object as one file: a header that says what it is, then its bytes.

The header has magic, format version, lengths of key and group, length of the object; then key and group; then zeros
up to a multiple of 64 bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from time import monotonic

from transfer.aligned import align, empty
from transfer.local import Found, Held
from transfer.objects import Item, Read

HEADER = struct.Struct("<8sIHHQ")
MAGIC = b"kdajaxOB"
VERSION = 1
NO_GROUP = 0xFFFF
STEP_NBYTES = 16 * 2**20
"""Bytes moved between two looks at the clock."""


def header_nbytes(key: str, group: str | None) -> int:
    """Where the object's bytes begin in its file."""
    return align(HEADER.size + len(key) + len(group or ""))


def write(fd: int, item: Item, until: float) -> bool:
    """Writes an object to an empty file; False if the deadline passed first. Raises OSError."""
    key, group = item.key.encode(), (item.group or "").encode()
    length = NO_GROUP if item.group is None else len(group)
    header = HEADER.pack(MAGIC, VERSION, len(key), length, item.nbytes) + key + group
    header = header.ljust(header_nbytes(item.key, item.group), b"\0")
    for batch in _batches([memoryview(header), *(piece.data for piece in item.pieces)]):
        if monotonic() >= until:
            return False
        _write_all(fd, batch)
    return True


def read(fd: int, read: Read, nbytes: int, until: float) -> Found:
    """Reads of an object that should have `nbytes`. Raises OSError."""
    held = describe(fd)
    if held is None or held[:2] != (read.key, nbytes):
        return Found("damaged")
    start = header_nbytes(held.key, held.group) + read.start
    raw, done = empty(nbytes - read.start if read.nbytes is None else read.nbytes), 0
    while done < raw.nbytes:
        if monotonic() >= until:
            return Found("late")
        got = os.preadv(fd, [raw[done : done + STEP_NBYTES].data], start + done)
        if not got:
            return Found("damaged")
        done += got
    return Found("hit", raw)


def describe(fd: int) -> Held | None:
    """What a file holds; None if it is not a whole object."""
    start = os.pread(fd, HEADER.size, 0)
    if len(start) < HEADER.size:
        return None
    magic, version, key_length, group_length, nbytes = HEADER.unpack(start)
    if (magic, version) != (MAGIC, VERSION):
        return None
    grouped = group_length != NO_GROUP
    names = os.pread(fd, key_length + group_length * grouped, HEADER.size)
    try:
        key, group = names[:key_length].decode("ascii"), names[key_length:].decode("ascii")
    except UnicodeDecodeError:
        return None
    held = Held(key, nbytes, group if grouped else None)
    return held if os.fstat(fd).st_size == header_nbytes(key, held.group) + nbytes else None


def _batches(pieces: Sequence[memoryview]) -> list[list[memoryview]]:
    """Pieces cut and gathered for one system call each."""
    most = os.sysconf("SC_IOV_MAX")
    batches: list[list[memoryview]] = [[]]
    room = STEP_NBYTES
    for piece in pieces:
        for start in range(0, len(piece), STEP_NBYTES):
            cut = piece[start : start + STEP_NBYTES]
            if len(cut) > room or len(batches[-1]) == most:
                batches.append([])
                room = STEP_NBYTES
            batches[-1].append(cut)
            room -= len(cut)
    return batches


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    while pieces:
        done = os.writev(fd, pieces)
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][done:]
