"""Named arrays as the parts of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from transfer.aligned import ALIGNMENT, align, is_aligned, join
from transfer.dtypes import DTYPES, dtype_name
from transfer.manifest import About, Leaf, Manifest, Miss, Segment, Unreadable, parts_of
from transfer.objects import Bytes

PART_NBYTES = 64 * 2**20
ZEROS = np.zeros(ALIGNMENT, np.uint8)
ZEROS.flags.writeable = False


class Packed(NamedTuple):
    """A checkpoint to store.

    Attributes:
        manifest: says what lies where.
        parts: each part's bytes as pieces, which are the caller's own memory and zeros between.
        copied: bytes of the leaves that were not contiguous, and had to be copied.
    """

    manifest: Manifest
    parts: tuple[tuple[Bytes, ...], ...]
    copied: int


def pack(arrays: Mapping[str, NDArray], about: About, part_nbytes: int = PART_NBYTES) -> Packed:
    """Lays arrays out in parts, in the order of their names, and digests every byte once. Copies nothing that is
    contiguous in C order.

    A leaf goes to the next part if the current one has no room for it, and is cut only if no part had.

    Args:
        arrays: by name, of the dtypes in `transfer.dtypes`, any shape. Not to be changed until they are stored.
        about: which checkpoint it is.
        part_nbytes: most bytes of a part, a multiple of 64.

    Raises:
        ValueError: for another dtype or byte order, with the leaf's name, and for a bad `part_nbytes` or `about`.
    """
    _check(arrays, about, part_nbytes)
    leaves: list[Leaf] = []
    parts: list[list[Bytes]] = []
    end, copied = part_nbytes, 0  # what the current part holds: before the first, no room
    for name in sorted(arrays):
        array, dtype, segments = arrays[name], dtype_name(name, arrays[name]), []
        if not array.flags.c_contiguous:
            array, copied = np.array(array, order="C"), copied + array.nbytes
        raw = array.reshape(-1).view(np.uint8)
        for start in range(0, raw.nbytes, part_nbytes):
            piece, offset = raw[start : start + part_nbytes], align(end)
            if offset + piece.nbytes > part_nbytes:
                parts.append([])
                end = offset = 0
            digest = xxhash.xxh3_128_hexdigest(piece.data)
            segments.append(Segment(len(parts) - 1, offset, piece.nbytes, digest))
            parts[-1] += [ZEROS[: offset - end], piece] if offset > end else [piece]
            end = offset + piece.nbytes
        leaves.append(Leaf(name, dtype, array.shape, tuple(segments)))
    manifest = Manifest(about, parts_of(leaves), tuple(leaves))
    return Packed(manifest, tuple(map(tuple, parts)), copied)


def _check(arrays: Mapping[str, NDArray], about: About, part_nbytes: int) -> None:
    if part_nbytes < ALIGNMENT or part_nbytes % ALIGNMENT:
        raise ValueError(f"{part_nbytes=} must be a positive multiple of {ALIGNMENT}")
    if type(about.boundary) is not int or about.boundary < 0:
        raise ValueError(f"a boundary is a count of tokens, an int, got {about.boundary!r}")
    for text in (about.namespace, about.parent or "", *arrays):
        if not isinstance(text, str):
            raise ValueError(f"namespace, parent and the leaves' names are strings, got {text!r}")


class Run(NamedTuple):
    """Segments side by side in one part, and whose they are: what one read brings."""

    part: int
    start: int
    nbytes: int
    segments: tuple[Segment, ...]


def runs(manifest: Manifest, wanted: Collection[str]) -> list[Run]:
    """The fewest runs that hold the wanted leaves and no others' bytes."""
    found: list[Run] = []
    beside = False
    for leaf in manifest.leaves:
        for segment in leaf.segments:
            if leaf.name in wanted:
                last = found[-1] if beside and found and found[-1].part == segment.part else None
                start = last.start if last else segment.offset
                before = found.pop().segments if last else ()
                nbytes = segment.offset + segment.nbytes - start
                found.append(Run(segment.part, start, nbytes, (*before, segment)))
            beside = leaf.name in wanted
    return found


def unpack(
    manifest: Manifest, wanted: Collection[str], found: Sequence[tuple[Run, Bytes]]
) -> tuple[dict[str, NDArray], int]:
    """The wanted arrays, from the bytes of their runs; every byte of theirs is compared with its digest.

    Returns:
        read-only arrays by name at multiples of 64 bytes, which share memory with `found`; and how many bytes had to
        be copied: those of leaves that were cut, or whose run begins elsewhere.

    Raises:
        Unreadable: if a byte is not what was packed; its `part` says where.
    """
    pieces: dict[Segment, Bytes] = {}
    for run, raw in found:
        for segment in run.segments:
            piece = raw[segment.offset - run.start :][: segment.nbytes]
            if xxhash.xxh3_128_hexdigest(piece.data) != segment.digest:
                raise Unreadable(
                    Miss.DAMAGED_PART, f"part {segment.part}, byte {segment.offset}", segment.part
                )
            pieces[segment] = piece
    arrays, copied = {}, 0
    for leaf in manifest.leaves:
        if leaf.name in wanted:
            own = [pieces[segment] for segment in leaf.segments]
            if len(own) == 1 and is_aligned(own[0]):
                raw = own[0]
            else:
                raw, copied = join(own), copied + leaf.nbytes
            array = raw.view(DTYPES[leaf.dtype]).reshape(leaf.shape)
            array.flags.writeable = False
            arrays[leaf.name] = array
    return arrays, copied
