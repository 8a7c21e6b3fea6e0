"""A store that outlives its process: saved to a folder, restored from it, less what cannot be read again.

A folder has numbered versions; one appears when all of it is on the disk. In a version, each payload is a file under
the digest of its contents, and the index, which names them, is there twice. So a file that is damaged costs the
checkpoints that need it and nothing else. What the index alone holds (boundaries without bytes, what policies have
learned) is small and is read back as it was.

Not an Orbax checkpoint: that is one tree, whose one list of names is lost or kept as a whole, and it reads flipped
bits of an array back without an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from immutables import Map

from cache.files import digest, new_version, packed, read, unpacked, versions, write
from cache.index import Index
from cache.payload import Payload, nbytes
from cache.prompts import Place, Prompts
from cache.retention.protocol import Boundary, Kind, Lasting, Policy
from cache.saved_index import Line, SavedIndex, SavedTier, decoded, encoded
from cache.shelf import Shelf
from cache.stats import Counts
from cache.store import Store
from cache.tier import Tier
from cache.tiers import Storages, page_name, state_name
from cache.tokens import MediaIds

INDEX_FILES = ("index.1", "index.2")


class Saved(NamedTuple):
    """What was written.

    Attributes:
        files: payloads, each once.
        nbytes: of these files.
        lost: states and pages that their tier could not give.
    """

    files: int
    nbytes: int
    lost: int


def save(store: Store, folder: str | os.PathLike[str], storages: Storages, now: float) -> Saved:
    """Writes a store's boundaries, payloads and what its policies know. Pins are not kept.

    An earlier save in the folder is valid until this one is complete, then it goes: there is room for both. One process
    saves at a time.

    Args:
        store: any version; others may go on from it meanwhile.
        folder: made if it is not there; use one for nothing else.
        storages: of each of the store's tiers; payloads are read from them.
        now: seconds, of the store's clock.

    Raises:
        OSError: if the folder cannot be written. What was saved before is still there.
        ValueError: if a tier's payloads are not named arrays.
    """
    with new_version(Path(folder)) as inside:
        writer = _Writer(inside, storages)
        tiers = {tier: writer.tier(tier, shelf, now) for tier, shelf in store.shelves.items()}
        ids = store.prompts.media.ids
        media = sorted(ids, key=lambda each: -ids[each])
        data = encoded(SavedIndex(store.prompts.page, now, media, _lines(store.prompts), tiers))
        for name in INDEX_FILES:
            write(inside / name, data)
    return Saved(len(writer.written), sum(writer.written.values()), writer.lost)


def restore(folder: str | os.PathLike[str], empty: Store, storages: Storages, now: float) -> Store:
    """A store with what was saved, as far as it can be read, found whole and has room.

    Ages go on from where they were: the time between is no time. Checkpoints that cannot be read are counted as lost,
    those without room, the least worth first, as skipped; both stay remembered. A version whose index cannot be read is
    one loss, and an older one is used, if there is one.

    Args:
        folder: that `save` wrote to. Without a save in it, the store stays empty.
        empty: a new store: its tiers, budgets and policies are those of the restored one. Bytes of tiers that it lacks
            are left where they are, their boundaries are remembered.
        storages: of each tier; what they return on `write` is what the store keeps.
        now: seconds, of the store's clock from here on.

    Raises:
        ValueError: if `empty` is not, or has pages of another size than the saved store, whose keys depend on it.
    """
    if empty.prompts.places:
        raise ValueError(f"restore into an empty store, got one with {len(empty.prompts.places)} boundaries")
    unread = 0
    for inside in versions(Path(folder)):
        for name in INDEX_FILES:
            try:
                index = decoded((inside / name).read_bytes())
            except (OSError, ValueError):
                continue
            return _Restoring(index, inside, empty, storages, now - index.now).store(unread)
        unread += 1
    return empty._replace(counts=Counts(lost=unread))


class _Writer:
    """Writes payloads, each contents once."""

    def __init__(self, folder: Path, storages: Storages) -> None:
        self.folder, self.storages = folder, storages
        self.written: dict[bytes, int] = {}
        self.lost = 0

    def tier(self, tier: Tier, shelf: Shelf, now: float) -> SavedTier:
        """All that a tier holds."""
        order = list(shelf.policy.victims(max(shelf.nbytes, 1), now))
        states = {key: self.payload(tier, state_name(key), shelf.states[key]) for key in order}
        pages = {name: self.payload(tier, page_name(name), page) for name, page in shelf.pages.items()}
        policy = shelf.policy.saved() if isinstance(shelf.policy, Lasting) else None
        return SavedTier(_there(states), _there(pages), policy)

    def payload(self, tier: Tier, name: str, kept: Payload) -> bytes | None:
        """The digest of a payload's file, None if the tier cannot give it."""
        try:
            payload = self.storages[tier].read(name, kept)
        except (OSError, ValueError):
            self.lost += 1
            return None
        data = packed(payload)
        found = digest(data)
        if found not in self.written:
            write(self.folder / found.hex(), data)
            self.written[found] = len(data)
        return found


def _there(digests: dict[bytes, bytes | None]) -> dict[bytes, bytes]:
    return {key: value for key, value in digests.items() if value is not None}


def _lines(prompts: Prompts) -> list[Line]:
    """All boundaries, shallow to deep."""
    keys = sorted(prompts.places, key=lambda key: (prompts.node(key).stop, key))
    at = {key: number for number, key in enumerate(keys)}
    lines = []
    for key in keys:
        place, index = prompts.places[key], prompts.index(key)
        parent = index.parent(place.node)
        node = index.nodes[place.node]
        above = (each for _, each in index.ancestors(node.parent))
        nodes = [node, *takewhile(lambda each: each.key is None, above)][::-1]
        edge = np.concatenate([node.edge for node in nodes])
        names = tuple(chain.from_iterable(node.names for node in nodes))
        number = -1 if parent is None else at[parent]
        lines.append(
            Line(key, place.namespace, number, node.stop, place.kind, place.turn, node.last_use, edge, names)
        )
    return lines


class _Restoring:
    """What was saved becomes a store, tier by tier."""

    def __init__(
        self, saved: SavedIndex, folder: Path, empty: Store, storages: Storages, later: float
    ) -> None:
        if saved.page != empty.prompts.page:
            raise ValueError(
                f"the saved store has pages of {saved.page} rows, this one of {empty.prompts.page}: keys differ; "
                "make the empty store with the same page, or start without the save"
            )
        self.saved, self.folder, self.empty = saved, folder, empty
        self.storages, self.later = storages, later
        self.prompts = self._remembered()
        self.lost = self.skipped = 0

    def store(self, unread: int) -> Store:
        """The store; `unread` is what was lost before."""
        shelves = {
            tier: self._shelf(tier, shelf, self.saved.tiers.get(tier, SavedTier({}, {}, None)))
            for tier, shelf in self.empty.shelves.items()
        }
        counts = Counts(skipped=self.skipped, lost=self.lost + unread)
        return self.empty._replace(prompts=self.prompts, shelves=Map(shelves), counts=counts)

    def _remembered(self) -> Prompts:
        """All boundaries, without bytes."""
        saved, indexes, places = self.saved, {}, {}
        for line in saved.lines:
            index = indexes.get(line.namespace) or Index.empty(saved.page)
            above = () if line.parent < 0 else index.tokens(places[saved.lines[line.parent].key].node)
            tokens = np.concatenate([np.asarray(above, np.int32), line.edge])
            index, node = index.insert(tokens, line.key, line.names, line.last_use + self.later)
            indexes[line.namespace] = index
            places[line.key] = Place(line.namespace, node, Kind(line.kind), line.turn)
        media = MediaIds(Map({each: -1 - at for at, each in enumerate(saved.media)}))
        return Prompts(page=saved.page, indexes=Map(indexes), places=Map(places), media=media)

    def _shelf(self, tier: Tier, shelf: Shelf, saved: SavedTier) -> Shelf:
        """What a tier holds again, the most worth first."""
        held: list[bytes] = []
        for key in reversed(saved.states):
            try:
                state, pages = self._checkpoint(key, tier, saved)
            except (OSError, ValueError):
                self.lost += 1
                continue
            more = shelf.add(key, state, pages, 0.0, shelf.policy)
            rows = self.prompts.node(key).stop // self.saved.page * self.saved.page
            largest = self.empty.share * shelf.budget
            if more.excess or nbytes(state) + self.empty.row_nbytes * rows > largest:
                self.skipped += 1
                continue
            index = self.prompts.index(key).hold(self.prompts.places[key].node, tier)
            self.prompts = self.prompts.set_index(key, index)
            shelf = more
            held.append(key)
        return shelf.with_policy(self._policy(shelf.policy, saved, held[::-1]))

    def _checkpoint(self, key: bytes, tier: Tier, saved: SavedTier) -> tuple[Payload, dict[bytes, Payload]]:
        """A state and the pages that the tier lacks by now. Raises OSError or ValueError if one is not whole."""
        names = self.prompts.lacks(key, tier)
        gone = [name.hex() for name in names if name not in saved.pages]
        if gone:
            raise ValueError(f"pages {gone} could not be saved")
        files = {name: self._read(saved.pages[name]) for name in names}
        state = self.storages[tier].write(state_name(key), self._read(saved.states[key]))
        return state, {name: self.storages[tier].write(page_name(name), page) for name, page in files.items()}

    def _read(self, expected: bytes) -> Payload:
        return unpacked(read(self.folder / expected.hex(), expected))

    def _policy(self, policy: Policy, saved: SavedTier, held: Sequence[bytes]) -> Policy:
        """A tier's policy with what it knew; one that is not `Lasting` hears of all boundaries anew, and of what is
        held in its order."""
        lines, sizes = self.saved.lines, (self.empty.state_nbytes, self.empty.row_nbytes)
        boundaries = [
            Boundary(line.key, line.stop, parent, (), Kind(line.kind), line.turn, *sizes)
            for line in lines
            for parent in [lines[line.parent].key if line.parent >= 0 else None]
        ]
        if isinstance(policy, Lasting) and saved.policy is not None:
            return policy.restored(saved.policy, boundaries, held, self.later)
        last_use = {line.key: line.last_use + self.later for line in lines}
        at = min(last_use.values(), default=0.0)
        for boundary in boundaries:
            policy = policy.made(boundary, at)
        for key in held:
            at = max(at, last_use[key])
            policy = policy.held(key, at)
        return policy
