"""Files of a saved store: named arrays under their digests, and folders that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16, float8 and int4 by name from here on
import numpy as np
from numpy.typing import NDArray

from cache.payload import Payload

DIGEST_NBYTES = 32
ALIGNMENT = 64
"""Leaves begin at multiples of so many bytes."""


def digest(data: bytes) -> bytes:
    """Names contents."""
    return hashlib.blake2b(data, digest_size=DIGEST_NBYTES).digest()


def packed(payload: Payload) -> bytes:
    """Named arrays as bytes: a line of JSON with names, dtypes and shapes, then the leaves.

    Raises:
        ValueError: for a payload that is no mapping of arrays, and for dtypes that a name does not tell.
    """
    if not hasattr(payload, "items"):
        raise ValueError(
            f"only named arrays can be written to files, got {type(payload).__name__}: let the tier's storage read them"
        )
    leaves = {name: np.ascontiguousarray(array) for name, array in payload.items()}  # type: ignore[union-attr]
    shapes = {name: np.shape(array) for name, array in payload.items()}  # type: ignore[union-attr]
    for name, leaf in leaves.items():
        if leaf.dtype.hasobject or leaf.dtype.fields or np.dtype(leaf.dtype.name) != leaf.dtype:
            raise ValueError(
                f"leaf {name!r} has dtype {leaf.dtype!r}, which has no name of its own; convert it"
            )
    described = [[name, leaf.dtype.name, shapes[name]] for name, leaf in leaves.items()]
    parts = [json.dumps(described).encode() + b"\n", *(leaf.tobytes() for leaf in leaves.values())]
    return b"".join(part + bytes(-len(part) % ALIGNMENT) for part in parts)


def unpacked(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays that were packed; they cannot be written to."""
    line = data.index(b"\n") + 1
    at, leaves = _aligned(line), {}
    for name, dtype, shape in json.loads(data[:line]):
        count = int(np.prod(shape, dtype=np.int64))
        leaf = np.frombuffer(data, np.dtype(dtype), count, at) if count else np.empty(0, np.dtype(dtype))
        leaves[name], at = leaf.reshape(shape), _aligned(at + leaf.nbytes)
    return leaves


def write(path: Path, data: bytes) -> None:
    """Writes a new file; its bytes are on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, expected: bytes) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if its bytes have another digest.
    """
    data = path.read_bytes()
    if digest(data) != expected:
        raise ValueError(f"{path} is not what was written: {len(data)} bytes with another digest")
    return data


@contextmanager
def new_version(folder: Path) -> Iterator[Path]:
    """A folder to write into. It becomes the latest version when all is written, and only then do older ones go."""
    folder.mkdir(parents=True, exist_ok=True)
    old = versions(folder)
    for left in folder.glob("saving-*"):
        shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="saving-", dir=folder))
    try:
        yield new
        for inner in (*(path for path in new.rglob("*") if path.is_dir()), new):
            _sync(inner)
        new.rename(folder / f"{int(old[0].name) + 1 if old else 1:08d}")
        _sync(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def versions(folder: Path) -> list[Path]:
    """The complete versions in a folder, the latest first."""
    found = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def _aligned(at: int) -> int:
    return at + -at % ALIGNMENT


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
