"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yields a folder to write into; it becomes `path` when the block ends well, and vanishes otherwise.

    Args:
        path: the folder to make, and its parents; it must not exist, or be empty.

    Raises:
        ValueError: if `path` is a file, or a folder that holds something.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"{path} exists and is not an empty folder; nothing is overwritten, give another path"
        )
    written = _beside(path)
    written.mkdir(parents=True)
    try:
        yield written
        if path.exists():
            path.rmdir()
        os.rename(written, path)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yields a path to write to, which becomes `path`, or replaces it, when the block ends well.

    Args:
        path: the file to make; its folder is made too.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    written = _beside(path)
    try:
        yield written
        os.replace(written, path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
