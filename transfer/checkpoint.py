"""Whole checkpoints in a store of objects: all of one, or nothing.

The parts come first and the manifest last; readers start at the manifest, and removal takes it first. A part's key has
its content in it, so that two writers of one name never mix: the first manifest stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from time import monotonic
from typing import NamedTuple

from numpy.typing import NDArray

from transfer.beside import ahead
from transfer.calls import deadline
from transfer.counters import Recorder
from transfer.manifest import About, Manifest, Miss, Unreadable, decode, encode
from transfer.objects import Bytes, Item, Objects, Put, Read
from transfer.packing import PART_NBYTES, Digested, Layout, Run, digest, lay_out, manifest_of, runs, unpack


class Checkpoint(NamedTuple):
    """What was read.

    Attributes:
        about: which checkpoint it is.
        arrays: by name, read-only, at multiples of 64 bytes; nobody else has their memory.
        nbytes: of all arrays.
        copied: bytes that were copied after the store had read them: leaves larger than a part.
    """

    about: About
    arrays: dict[str, NDArray]
    nbytes: int
    copied: int


def publish(
    objects: Objects,
    name: str,
    arrays: Mapping[str, NDArray],
    about: About,
    timeout: float,
    part_nbytes: int = PART_NBYTES,
    recorder: Recorder | None = None,
) -> Put:
    """Stores a checkpoint: its parts, and when all are there its manifest. All objects are of group `name`.

    Args:
        name: a key of at most 479 characters, which stands for exactly this content; no other checkpoint's name
            and a "/" begin it.
        arrays: by name, of the dtypes in `transfer.dtypes`. Not to be changed before the call has ended, nor after it
            if it ended with `Put.LATE`.
        about: which checkpoint it is.
        timeout: seconds until the call has ended. Digests and the copies of what is not contiguous are not cut short.
        part_nbytes: most bytes of a part, a multiple of 64. Another value makes other objects of the same arrays.
        recorder: counts the outcome under `publish`, and what had to be copied.

    Returns:
        STORED; HELD if it was there before, with equal bytes; CONFLICT if another one of this name was, which is left
        as it was; else why not. But for LATE, nothing of it stays behind if it is not there, as far as the store can
        do that in time.

    Raises:
        ValueError: for arrays that a checkpoint does not hold, and a bad name.
    """
    recorder = recorder or Recorder()
    with recorder.call("publish") as ended:
        until = deadline(timeout)
        layout = lay_out(arrays, about, part_nbytes)
        recorder.add(copied=layout.copied)
        parts, puts = _put_parts(objects, name, layout, until)
        put, nbytes = puts[-1] if puts else Put.STORED, sum(part.part.nbytes for part in parts)
        if put.there:
            last = Item(name, [encode(manifest_of(layout, about, parts))], name)
            put, nbytes = _put_manifest(objects, last, until), nbytes + last.nbytes
        if not put.there and put is not Put.LATE:
            own = [part.part.key(name) for part, one in zip(parts, puts) if one is Put.STORED]
            _take_back(objects, name, own, there=put is Put.CONFLICT, until=until)
        ended.append((put.value, nbytes))
        return put


def fetch(
    objects: Objects,
    name: str,
    namespace: str,
    leaves: Collection[str] | None,
    timeout: float,
    recorder: Recorder | None = None,
) -> Checkpoint | None:
    """Reads a checkpoint, or some leaves of it, and compares every byte that it returns with its digest.

    A damaged part is removed, so that the next `publish` can put it right.

    Args:
        namespace: the one that it has to be of.
        leaves: names of the leaves to read, without the bytes of others; None for all.
        timeout: seconds until the call has ended. Digests are not cut short.
        recorder: counts the outcome under `fetch`: `hit`, or a value of `Miss`.

    Returns:
        None if any of it is missing, short, damaged, late or of another namespace or version.

    Raises:
        ValueError: for a bad name.
    """
    until = deadline(timeout)
    with (recorder or Recorder()).call("fetch") as ended:
        try:
            checkpoint = _fetch(objects, name, namespace, leaves, until)
        except Unreadable as error:
            ended.append((error.miss.value, 0))
            return None
        ended.append(("hit", checkpoint.nbytes))
        return checkpoint


def fetch_all(
    objects: Objects, names: Sequence[str], namespace: str, timeout: float, recorder: Recorder | None = None
) -> list[Checkpoint | None]:
    """Reads many checkpoints as `fetch` reads one, in two calls of the store: their manifests, then their parts.

    Raises:
        ValueError: for a bad name.
    """
    until = deadline(timeout)
    with (recorder or Recorder()).call("fetch") as ended:
        manifests: list[Manifest | Unreadable] = []
        for raw in _get(objects, [Read(name) for name in names], until):
            try:
                manifests.append(_checked(raw, namespace, until))
            except Unreadable as error:
                manifests.append(error)
        wanted = [
            (runs(manifest, _leaves(manifest)), manifest.part_keys(name))
            if isinstance(manifest, Manifest)
            else ([], [])
            for name, manifest in zip(names, manifests)
        ]
        reads = [Read(keys[run.part], run.start, run.nbytes) for each, keys in wanted for run in each]
        raws, found = iter(_get(objects, reads, until)), []
        for manifest, (each, keys) in zip(manifests, wanted):
            got = [next(raws) for _ in each]
            try:
                if isinstance(manifest, Unreadable):
                    raise manifest
                leaves = _leaves(manifest)
                found.append(_unpacked(objects, manifest, keys, list(zip(each, got)), leaves, until))
                ended.append(("hit", found[-1].nbytes))
            except Unreadable as error:
                found.append(None)
                ended.append((error.miss.value, 0))
        return found


def withdraw(objects: Objects, name: str, timeout: float) -> bool:
    """Removes a checkpoint, the manifest first; whether all of it is gone. What no manifest names is not found.

    A store that protects what is being read needs more time for it than that lasts (Mooncake: one lease).
    """
    until = deadline(timeout)
    keys = []
    try:
        keys = _manifest(objects, name, until).part_keys(name)
    except Unreadable as error:
        if error.miss is Miss.LATE:
            return False
    if not all(_remove(objects, [name], until)):
        return False
    return all(_remove(objects, keys, until))


def _put_parts(objects: Objects, name: str, layout: Layout, until: float) -> tuple[list[Digested], list[Put]]:
    """Stores the parts up to the first that cannot be, and how each ended. The next one is digested meanwhile."""
    parts: list[Digested] = []
    puts: list[Put] = []
    with closing(ahead(digest, layout.shelves)) as digested:
        for part in digested:
            parts.append(part)
            puts.append(_put_part(objects, Item(part.part.key(name), part.pieces, name), until))
            if not puts[-1].there:
                break
    return parts, puts


def _put_part(objects: Objects, item: Item, until: float) -> Put:
    """Stores a part. If it is there with another size it is damaged, as its key has its content in it: it goes."""
    put = _put(objects, item, until)
    if put is Put.CONFLICT and all(_remove(objects, [item.key], until, force=True)):
        put = _put(objects, item, until)
    return Put.FAILED if put is Put.CONFLICT else put


def _put_manifest(objects: Objects, item: Item, until: float) -> Put:
    """Stores the manifest; if there is one, tells an equal one from another one and from a damaged one."""
    for _ in range(2):
        put = _put(objects, item, until)
        if put not in (Put.HELD, Put.CONFLICT):
            return put
        held = _get(objects, [Read(item.key)], until)[0]
        if held is None:
            return Put.LATE if monotonic() >= until else Put.FAILED
        if held.tobytes() == item.pieces[0].tobytes():
            return Put.HELD
        try:
            decode(held)
            return Put.CONFLICT
        except Unreadable as error:
            if error.miss is Miss.VERSION or not all(_remove(objects, [item.key], until, force=True)):
                return Put.CONFLICT
    return Put.FAILED


def _take_back(objects: Objects, name: str, own: Sequence[str], there: bool, until: float) -> None:
    """Removes parts that a publish has stored, but for those that the manifest names; `there` if there is one. Then
    nobody can read them, and no protection of what is being read is waited for."""
    named: list[str] = []
    try:
        named = _manifest(objects, name, until).part_keys(name)
    except Unreadable as error:
        if there or error.miss is not Miss.ABSENT:
            return
    _remove(objects, [key for key in own if key not in named], until, force=there)


def _fetch(
    objects: Objects, name: str, namespace: str, leaves: Collection[str] | None, until: float
) -> Checkpoint:
    [raw] = _get(objects, [Read(name)], until)
    manifest = _checked(raw, namespace, until)
    wanted = _leaves(manifest) if leaves is None else set(leaves)
    if lacks := wanted - _leaves(manifest):
        raise Unreadable(Miss.LEAF, f"no leaves {sorted(lacks)}")
    keys, wanted_runs = manifest.part_keys(name), runs(manifest, wanted)
    found = _get(objects, [Read(keys[run.part], run.start, run.nbytes) for run in wanted_runs], until)
    return _unpacked(objects, manifest, keys, list(zip(wanted_runs, found)), wanted, until)


def _unpacked(
    objects: Objects,
    manifest: Manifest,
    keys: Sequence[str],
    found: Sequence[tuple[Run, Bytes | None]],
    wanted: set[str],
    until: float,
) -> Checkpoint:
    """The leaves that were read. Raises Unreadable."""
    there = [(run, raw) for run, raw in found if raw is not None]
    if len(there) < len(found):
        raise Unreadable(Miss.LATE if monotonic() >= until else Miss.PART, "a part was not read")
    try:
        arrays, copied = unpack(manifest, wanted, there)
    except Unreadable as error:
        if error.part is not None:
            _remove(objects, [keys[error.part]], until, force=True)
        raise
    return Checkpoint(manifest.about, arrays, sum(array.nbytes for array in arrays.values()), copied)


def _leaves(manifest: Manifest) -> set[str]:
    return {leaf.name for leaf in manifest.leaves}


def _checked(raw: Bytes | None, namespace: str, until: float) -> Manifest:
    """A manifest of this namespace. Raises Unreadable."""
    manifest = _decoded(raw, until)
    if manifest.about.namespace != namespace:
        raise Unreadable(Miss.NAMESPACE, f"of {manifest.about.namespace!r}, not {namespace!r}")
    return manifest


def _manifest(objects: Objects, name: str, until: float) -> Manifest:
    """Raises Unreadable."""
    [raw] = _get(objects, [Read(name)], until)
    return _decoded(raw, until)


def _decoded(raw: Bytes | None, until: float) -> Manifest:
    if raw is None:
        raise Unreadable(Miss.LATE if monotonic() >= until else Miss.ABSENT, "no manifest was read")
    return decode(raw)


# a store's call with what is left of the time; without any, as if it had been late


def _put(objects: Objects, item: Item, until: float) -> Put:
    left = until - monotonic()
    return objects.put([item], left)[0] if left > 0 else Put.LATE


def _get(objects: Objects, reads: Sequence[Read], until: float) -> list[Bytes | None]:
    left = until - monotonic()
    return objects.get(reads, left) if reads and left > 0 else [None] * len(reads)


def _remove(objects: Objects, keys: Sequence[str], until: float, force: bool = False) -> list[bool]:
    left = until - monotonic()
    return objects.remove(keys, left, force) if keys and left > 0 else [False] * len(keys)
