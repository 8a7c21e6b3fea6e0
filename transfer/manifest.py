"""What a checkpoint's manifest says, as bytes and back.

A header of 32 bytes (magic, format version, length of the body, digest of all but itself), which every version has,
then JSON. The payload is an address space
cut into parts, each an object. A leaf's bytes are one segment, or one a part for a leaf larger than a part; segments
follow each other at the next multiple of 64 bytes. So the leaves' order and lengths determine all offsets, and what
reads a manifest checks that they do.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import xxhash

from transfer.aligned import align
from transfer.dtypes import DTYPES
from transfer.errors import TransferError

VERSION = 1
MAGIC = b"kdajaxCP"
HEADER = struct.Struct("<8sII")
"""Magic, format version, length of the body in bytes; a digest of these and the body follows."""
BODY = HEADER.size + 16
"""Where the body begins."""
LARGEST = 2**63 - 1
"""Bytes of a leaf, elements along an axis."""


class Miss(Enum):
    """Why a checkpoint was not read."""

    ABSENT = "absent"
    """There is no manifest of this name, or it could not be read."""
    VERSION = "version"
    """Written in another format version."""
    NAMESPACE = "namespace"
    """Of another namespace."""
    LEAF = "leaf"
    """Whole, but without a leaf that was asked for."""
    DAMAGED = "damaged manifest"
    """The manifest's bytes are not what was written, or say what cannot be."""
    PART = "lost part"
    """A part is gone, shorter than the manifest says, or could not be read."""
    DAMAGED_PART = "damaged part"
    """A part's bytes are not what was written."""
    LATE = "late"
    """The deadline passed first."""


class Unreadable(TransferError):
    """A manifest or a part that must not be used; `part` is its index, None for the manifest."""

    def __init__(self, miss: Miss, why: str, part: int | None = None) -> None:
        super().__init__(f"{miss.value}: {why}")
        self.miss, self.part = miss, part


class About(NamedTuple):
    """Which checkpoint it is.

    Attributes:
        namespace: all that states must share to be exchanged (weights, layout, tenant), as one string.
        boundary: tokens before the state.
        parent: name of the checkpoint that this one continues, if any.
    """

    namespace: str
    boundary: int
    parent: str | None = None


class Segment(NamedTuple):
    """A run of a leaf's bytes: bytes [offset, offset + nbytes) of a part, and their xxh3_128 as hex."""

    part: int
    offset: int
    nbytes: int
    digest: str


class Leaf(NamedTuple):
    """An array: a key of `DTYPES`, its shape, and its bytes in C order. One of no bytes has no segment."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Part(NamedTuple):
    """An object: its length, and a digest of what lies where in it, with which it is named."""

    digest: str
    nbytes: int

    def key(self, name: str) -> str:
        """The key of a part of a checkpoint called `name`. Parts of other bytes have other keys."""
        return f"{name}/{self.digest}"


class Manifest(NamedTuple):
    """A checkpoint without its bytes."""

    about: About
    parts: tuple[Part, ...]
    leaves: tuple[Leaf, ...]

    def part_keys(self, name: str) -> list[str]:
        """The keys of the parts of a checkpoint called `name`."""
        return [part.key(name) for part in self.parts]


def parts_of(leaves: Iterable[Leaf]) -> tuple[Part, ...]:
    """The parts that the leaves' segments lie in."""
    within: dict[int, list[Segment]] = {}
    for leaf in leaves:
        for segment in leaf.segments:
            within.setdefault(segment.part, []).append(segment)
    return tuple(part_of(segments) for segments in within.values())


def part_of(segments: Sequence[Segment]) -> Part:
    """The part that is made of these segments."""
    content = "\n".join(f"{index} {offset} {nbytes} {digest}" for index, offset, nbytes, digest in segments)
    end = segments[-1].offset + segments[-1].nbytes
    return Part(xxhash.xxh3_128_hexdigest(content.encode()), end)


def encode(manifest: Manifest) -> np.ndarray:
    """A manifest as bytes. Equal manifests give equal bytes."""
    about, parts, leaves = manifest
    content = {
        **about._asdict(),
        "parts": [part._asdict() for part in parts],
        "leaves": [
            leaf._asdict() | {"segments": [segment._asdict() for segment in leaf.segments]} for leaf in leaves
        ],
    }
    body = json.dumps(content, separators=(",", ":")).encode()
    return np.frombuffer(signed(body), np.uint8)


def signed(body: bytes, magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    """A body behind its header."""
    header = HEADER.pack(magic, version, len(body))
    return header + xxhash.xxh3_128_digest(header + body) + body


def decode(raw: np.ndarray) -> Manifest:
    """The manifest that `encode` wrote, checked so that what follows from it can be trusted.

    Raises:
        Unreadable: for anything else.
    """
    if raw.nbytes < BODY:
        raise Unreadable(Miss.DAMAGED, f"{raw.nbytes} bytes, fewer than the header's {BODY}")
    magic, version, nbytes = HEADER.unpack(raw[: HEADER.size].tobytes())
    body = raw[BODY:].tobytes()
    if magic != MAGIC or nbytes != len(body) or raw.tobytes() != signed(body, magic, version):
        raise Unreadable(Miss.DAMAGED, f"{len(body)} bytes that are not the {nbytes} that were written")
    if version != VERSION:
        raise Unreadable(Miss.VERSION, f"format version {version}, this program reads {VERSION}")
    try:
        return _manifest(json.loads(body))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable(Miss.DAMAGED, f"its digest is right, its content is not: {error!r}") from error


def _manifest(content: Any) -> Manifest:
    """From JSON. Raises ValueError, KeyError or TypeError."""
    parent = None if content["parent"] is None else _of(str, content["parent"])
    about = About(_of(str, content["namespace"]), _size(content["boundary"]), parent)
    leaves = tuple(_leaf(leaf) for leaf in _of(list, content["leaves"]))
    _check_layout(leaves)
    if len({leaf.name for leaf in leaves}) != len(leaves):
        raise ValueError("two leaves of one name")
    parts = tuple(Part(part["digest"], part["nbytes"]) for part in _of(list, content["parts"]))
    if parts != parts_of(leaves):
        raise ValueError("parts other than the leaves' segments make")
    return Manifest(about, parts, leaves)


def _leaf(content: Any) -> Leaf:
    shape = tuple(_size(size) for size in _of(list, content["shape"]))
    dtype = DTYPES[content["dtype"]]
    if len(shape) > 64 or math.prod(size for size in shape if size) * dtype.itemsize > LARGEST:
        raise ValueError(f"no array has shape {shape}")
    segments = tuple(
        Segment(_size(s["part"]), _size(s["offset"]), _size(s["nbytes"]), _of(str, s["digest"]))
        for s in _of(list, content["segments"])
    )
    leaf = Leaf(_of(str, content["name"]), dtype.name, shape, segments)
    if leaf.nbytes != sum(segment.nbytes for segment in segments):
        raise ValueError(f"leaf {leaf.name!r} of {leaf.nbytes} bytes has segments of others")
    return leaf


def _check_layout(leaves: Iterable[Leaf]) -> None:
    """Raises ValueError unless segments follow each other, each in the part before or at the next part's start."""
    part, end = -1, 0
    for leaf in leaves:
        for segment in leaf.segments:
            follows = (segment.part, segment.offset) == (part, align(end))
            if not segment.nbytes or not (follows or segment[:2] == (part + 1, 0)):
                raise ValueError(f"a segment of leaf {leaf.name!r} is not where the one before it ends")
            part, end = segment.part, segment.offset + segment.nbytes


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} where a {kind.__name__} belongs")
    return value


def _size(value: Any) -> int:
    if not 0 <= _of(int, value) <= LARGEST:
        raise ValueError("a size below 0 or beyond what there is")
    return value
