"""Named arrays as the parts of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from transfer.aligned import ALIGNMENT, align, is_aligned, join
from transfer.beside import beside
from transfer.dtypes import DTYPES, dtype_name
from transfer.manifest import About, Leaf, Manifest, Miss, Part, Segment, Unreadable, part_of
from transfer.objects import Bytes

PART_NBYTES = 64 * 2**20
TOGETHER = 2**20  # bytes from which on a second thread helps
ZEROS = np.zeros(ALIGNMENT, np.uint8)
ZEROS.flags.writeable = False


class Place(NamedTuple):
    """Where bytes of a leaf go: to `offset` of a part."""

    leaf: str
    offset: int
    raw: Bytes


class Shelf(NamedTuple):
    """A part before its digests: its index, and what lies in it, in order."""

    index: int
    places: tuple[Place, ...]


class Layout(NamedTuple):
    """Where all arrays go.

    Attributes:
        arrays: by name, with their dtypes as in `transfer.dtypes`.
        shelves: the parts. Their bytes are the arrays' own, but for those of arrays that are not contiguous.
        copied: bytes of the arrays that are not contiguous, and had to be copied.
    """

    arrays: Mapping[str, tuple[NDArray, str]]
    shelves: tuple[Shelf, ...]
    copied: int


class Digested(NamedTuple):
    """A part to store.

    Attributes:
        part: its length and its digest.
        pieces: its bytes, which are the caller's own memory and zeros between.
        segments: by the name of the leaf whose they are; a leaf has one in a part.
    """

    part: Part
    pieces: tuple[Bytes, ...]
    segments: dict[str, Segment]


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
    """Lays arrays out in parts, and digests every byte once. See `lay_out`."""
    layout = lay_out(arrays, about, part_nbytes)
    parts = [digest(shelf) for shelf in layout.shelves]
    return Packed(manifest_of(layout, about, parts), tuple(part.pieces for part in parts), layout.copied)


def lay_out(arrays: Mapping[str, NDArray], about: About, part_nbytes: int = PART_NBYTES) -> Layout:
    """Lays arrays out in parts, in the order of their names. Copies nothing that is contiguous in C order.

    A leaf goes to the next part if the current one has no room for it, and is cut only if no part had.

    Args:
        arrays: by name, of the dtypes in `transfer.dtypes`, any shape. Not to be changed until they are stored.
        about: which checkpoint it is.
        part_nbytes: most bytes of a part, a multiple of 64.

    Raises:
        ValueError: for another dtype or byte order, with the leaf's name, and for a bad `part_nbytes` or `about`.
    """
    _check(arrays, about, part_nbytes)
    named = {name: (arrays[name], dtype_name(name, arrays[name])) for name in sorted(arrays)}
    shelves: list[list[Place]] = []
    end, copied = part_nbytes, 0  # what the current part holds: before the first, no room
    for name, (array, _) in named.items():
        if not array.flags.c_contiguous:
            array, copied = np.array(array, order="C"), copied + array.nbytes
        raw = array.reshape(-1).view(np.uint8)
        for start in range(0, raw.nbytes, part_nbytes):
            piece, offset = raw[start : start + part_nbytes], align(end)
            if offset + piece.nbytes > part_nbytes:
                shelves.append([])
                offset = 0
            shelves[-1].append(Place(name, offset, piece))
            end = offset + piece.nbytes
    return Layout(named, tuple(Shelf(i, tuple(places)) for i, places in enumerate(shelves)), copied)


def digest(shelf: Shelf) -> Digested:
    """A part with the digests of all its bytes, on two threads if there are many."""
    pieces: list[Bytes] = []
    segments: dict[str, Segment] = {}
    end = 0
    for (leaf, offset, raw), text in zip(shelf.places, _digests([place.raw for place in shelf.places])):
        segments[leaf] = Segment(shelf.index, offset, raw.nbytes, text)
        pieces += [ZEROS[: offset - end], raw] if offset > end else [raw]
        end = offset + raw.nbytes
    return Digested(part_of(list(segments.values())), tuple(pieces), segments)


def _digests(pieces: Sequence[Bytes]) -> list[str]:
    """The xxh3_128 of each as hex. One core does not read memory as fast as it can be read: two threads take turns."""
    found = [""] * len(pieces)
    left = iter(enumerate(pieces))  # the threads' together: each takes the next one

    def work() -> None:
        for i, piece in left:
            found[i] = xxhash.xxh3_128_hexdigest(piece.data)

    other = beside(work) if sum(piece.nbytes for piece in pieces) >= TOGETHER else None
    work()
    if other:
        other.result()
    return found


def manifest_of(layout: Layout, about: About, parts: Sequence[Digested]) -> Manifest:
    """The manifest of arrays all of whose parts are digested."""
    leaves = (
        Leaf(name, dtype, array.shape, tuple(part.segments[name] for part in parts if name in part.segments))
        for name, (array, dtype) in layout.arrays.items()
    )
    return Manifest(about, tuple(part.part for part in parts), tuple(leaves))


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
