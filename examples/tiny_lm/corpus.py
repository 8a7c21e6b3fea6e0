"""The text: the Python standard library's own sources, split by whole files into training and held-out parts."""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Folders that are not library sources, or that are tables and data in a .py coat: encodings/ is 1.4 MB of character
# maps, most of them each other's near copies (`cp858` shares 96 % of its lines with `cp850`), pydoc_data is one 757 kB
# string of documentation, lib2to3's test data is Python 2 in odd encodings.
SKIPPED_FOLDERS = ("site-packages", "encodings", "pydoc_data", "lib2to3/tests/data", "__pycache__")
SMALLEST_FILE = 64
HELD_OUT_SIZES = (1_000, 100_000)
SHARED_LINES = 0.2


class Source(NamedTuple):
    """One source file: `name` relative to the library's folder with forward slashes, and its bytes."""

    name: str
    data: bytes


class Split(NamedTuple):
    """Whole files for training and whole files never trained on, each in the order of their names."""

    train: tuple[Source, ...]
    held_out: tuple[Source, ...]


def standard_library() -> Path:
    """The folder that holds the running interpreter's standard library (PSF licence)."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_sources(root: Path | None = None) -> tuple[Source, ...]:
    """Reads every UTF-8 `.py` file under `root`, in the order of the names.

    Args:
        root: a folder; the running interpreter's standard library when None.

    Raises:
        ValueError: there is no such file under `root`.
    """
    root = standard_library() if root is None else Path(root)
    found = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if any(f"/{folder}/" in f"/{name}" for folder in SKIPPED_FOLDERS):
            continue
        data = path.read_bytes()
        if len(data) >= SMALLEST_FILE and _is_utf8(data):
            found.append(Source(name, data))
    if not found:
        raise ValueError(
            f"no .py file of at least {SMALLEST_FILE} bytes under {root}; give the folder of a library"
        )
    return tuple(found)


def shared_fraction(sources: Sequence[Source]) -> Mapping[str, float]:
    """For each file the largest fraction of its distinct lines that any single other file also has.

    Lines are stripped and count from 16 characters on; a line that 60 files or more have says nothing about copies
    and only counts in the denominator. 1.0 is a copy, 0.0 shares nothing.
    """
    lines = {
        source.name: {line for raw in source.data.split(b"\n") if len(line := raw.strip()) >= 16}
        for source in sources
    }
    holders: dict[bytes, list[str]] = defaultdict(list)
    for name, own in lines.items():
        for line in own:
            holders[line].append(name)
    fractions = {}
    for name, own in lines.items():
        shared = Counter[str]()
        for line in own:
            if 1 < len(holders[line]) < 60:
                shared.update(holders[line])
        shared.pop(name, None)
        fractions[name] = max(shared.values(), default=0) / max(len(own), 1)
    return fractions


def split_sources(sources: Sequence[Source], *, seed: int = 0, fraction: float = 0.025) -> Split:
    """Holds out whole files, in the order of a seeded hash of their names, until `fraction` of all bytes is reached.

    Only files of 1 to 100 kB are held out (the tail of larger ones would decide the figure alone), and only files
    that share less than a fifth of their lines with any other file: no near copy of a training file is held out.

    Args:
        sources: all files.
        seed: chooses other files; part of the hash.
        fraction: of the bytes of all files.

    Raises:
        ValueError: the fraction is not within (0, 0.5], or too few files may be held out.
    """
    if not 0.0 < fraction <= 0.5:
        raise ValueError(f"{fraction=} of the bytes cannot be held out; choose one in (0, 0.5]")
    shared = shared_fraction(sources)
    wanted = fraction * sum(len(source.data) for source in sources)
    smallest, largest = HELD_OUT_SIZES
    chosen, held_bytes = set(), 0
    for source in sorted(sources, key=lambda source: _name_hash(source.name, seed)):
        if held_bytes >= wanted:
            break
        if smallest <= len(source.data) <= largest and shared[source.name] < SHARED_LINES:
            chosen.add(source.name)
            held_bytes += len(source.data)
    if held_bytes < wanted:
        raise ValueError(
            f"only {held_bytes} of {wanted:.0f} bytes may be held out (files of {smallest} to {largest} bytes that are "
            f"no near copies); give more files or a smaller fraction"
        )
    return Split(
        train=tuple(source for source in sources if source.name not in chosen),
        held_out=tuple(source for source in sources if source.name in chosen),
    )


def digest(sources: Sequence[Source]) -> str:
    """SHA-256 over names and bytes: two runs with one digest saw the same files."""
    total = hashlib.sha256()
    for source in sources:
        total.update(f"{source.name}\0{len(source.data)}\0".encode())
        total.update(source.data)
    return total.hexdigest()


def top_folder(name: str) -> str:
    """The first folder of a file's name, "." for a module that lies at the top."""
    parts = PurePosixPath(name).parts
    return parts[0] if len(parts) > 1 else "."


def _name_hash(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
