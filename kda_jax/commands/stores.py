"""Stores of objects as the command line names them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kda_jax.commands.errors import CommandError

if TYPE_CHECKING:
    from transfer import Objects

KINDS = ("disk", "mooncake")
SPEC = "disk:FOLDER or mooncake:HOST:PORT"
BUDGET_NBYTES = 8 << 30


def open_store(spec: str) -> Objects:
    """Opens the store that `disk:FOLDER` or `mooncake:HOST:PORT` names.

    Raises:
        CommandError: for another spec, and for a store that cannot be opened, with what to do about it.
    """
    from transfer import DiskObjects, TransferError

    kind, _, where = spec.partition(":")
    if kind not in KINDS or not where:
        raise CommandError(f"{spec!r} names no store: give {SPEC}")
    try:
        if kind == "disk":
            return DiskObjects(where, BUDGET_NBYTES)
        from transfer.mooncake import MooncakeObjects, MooncakeSettings

        return MooncakeObjects(MooncakeSettings(master=where))
    except TransferError as error:
        raise CommandError(str(error)) from None


@contextmanager
def own_store(kind: str, folder: Path, nbytes: int) -> Iterator[str]:
    """A store of this run alone, as a spec to open it with: a folder inside of `folder`, or a Mooncake of this machine.

    Args:
        kind: one of `KINDS`.
        folder: an empty one.
        nbytes: room for objects.

    Raises:
        CommandError: for another kind, and where Mooncake cannot start, with what to do about it.
    """
    if kind == "disk":
        yield f"disk:{folder / 'objects'}"
    elif kind == "mooncake":
        from transfer import TransferError
        from transfer.mooncake.local import LocalMooncake

        try:
            mooncake = LocalMooncake(segment_bytes=nbytes)
        except TransferError as error:
            raise CommandError(str(error)) from None
        with mooncake:
            yield f"mooncake:{mooncake.address}"
    else:
        raise CommandError(f"{kind!r} is no kind of store: give {' or '.join(KINDS)}")
