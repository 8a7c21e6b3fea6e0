"""Bytes on their way between tiers: down before they are given up, up when they are wanted.

All reading and writing happens here, outside of the store's changes. A copy is published when all of it is written;
what cannot be read is a miss, and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from cache.errors import Broken
from cache.holder import Holder
from cache.keys import KeyChain
from cache.payload import Payload
from cache.plan import ResumePlan
from cache.store import Store
from cache.tier import Tier, fastest


class Storage(Protocol):
    """Where one tier's bytes lie.

    What `write` returns is what the store keeps: the bytes themselves, or something that says where they are. If that
    stands for something outside of Python, as a file or pages of a pool, it gives that back when it is collected
    (`weakref.finalize`): then no version of the store has it any more.
    """

    def write(self, name: str, payload: Payload) -> Payload:
        """Writes named bytes, all or nothing. Raises OSError if that is not possible."""
        ...

    def read(self, name: str, kept: Payload | None) -> Payload:
        """The bytes that were written; `kept` is None where the store has nothing of its own for this tier. Raises
        OSError, or ValueError for other bytes, if that is not possible."""
        ...


class InMemory:
    """Storage whose bytes the store itself keeps: device and host memory."""

    def __init__(self, convert: Callable[[Payload], Payload] = lambda payload: payload) -> None:
        """`convert` brings arrays here from another tier, as `jax.device_put` or `np.asarray` of each."""
        self._convert = convert

    def write(self, name: str, payload: Payload) -> Payload:
        """The payload, brought here."""
        return self._convert(payload)

    def read(self, name: str, kept: Payload | None) -> Payload:
        """What was kept."""
        if kept is None:
            raise OSError(f"{name} is not in memory")
        return kept


Storages = Mapping[Tier, Storage]
STATE, PAGE = "state/", "page/"
"""How the names of states and pages begin, in every storage."""


class Loaded(NamedTuple):
    """A checkpoint, whole: the state, and all pages of latents before the boundary."""

    state: Payload
    pages: tuple[Payload, ...]


def load(
    store: Store,
    resumed: ResumePlan,
    chain: KeyChain,
    storages: Storages,
    expand: Callable[[Payload], Payload] = lambda state: state,
) -> Loaded:
    """Reads the checkpoint of a plan and all pages before it, from where the plan says.

    Args:
        store: the version that the plan was made with, or a later one if the boundary was pinned in between.
        resumed: the plan; its boundary is not 0.
        chain: of the tokens before that boundary, from the first, with pages for units.
        storages: by tier. A tier that the store has no budget for, as a remote store, reads by name alone.
        expand: makes of a state that a tier holds the state to resume from, as `Compression.expanded`.

    Raises:
        Broken: if any part cannot be read. Nothing of the others is returned.
        ValueError: for a cold start, and for a chain of other tokens' number.
    """
    if resumed.state is None or chain.length != resumed.boundary:
        raise ValueError(f"nothing to load at {resumed.boundary} with a chain of {chain.length} tokens")
    state = _read(store, chain.key, resumed.state, None, storages)
    pages = [
        _read(store, chain.key, source.tier, name, storages)
        for source in resumed.rows
        for name in chain.added[source.start // chain.unit : source.stop // chain.unit]
    ]
    return Loaded(expand(state), tuple(pages))


def promote(holder: Holder, key: bytes, tier: Tier, storages: Storages, now: float) -> bool:
    """Copies a checkpoint to a faster tier; where it was, it stays. Whether it is there now."""
    return _copy(holder, key, tier, storages, now)


def demote(holder: Holder, key: bytes, tier: Tier, storages: Storages, now: float) -> bool:
    """Takes a checkpoint from a tier, after copying it to the next slower one that has a budget and room.

    Whether a slower tier holds it now; if not, it is gone. Where it is pinned it stays, and is copied all the same.
    """
    slower = [other for other in sorted(holder.store.shelves) if other > tier]
    if key in holder.store.shelves[tier].states:
        any(_copy(holder, key, other, storages, now) for other in slower)
        holder.update(lambda store: store.drop(key, tier, now))
    return any(key in holder.store.shelves[other].states for other in slower)


def make_room(holder: Holder, tier: Tier, num_bytes: int, storages: Storages, now: float) -> bool:
    """Demotes what is worth least, and is not pinned, until a tier has `num_bytes` free. Whether it has."""
    shelf = holder.store.shelves[tier]
    needed = shelf.nbytes + num_bytes - shelf.budget
    for key in holder.store.victims(tier, needed, now) if needed > 0 else ():
        if key not in holder.store.pinned:
            demote(holder, key, tier, storages, now)
        if holder.store.shelves[tier].nbytes + num_bytes <= shelf.budget:
            break
    return holder.store.shelves[tier].nbytes + num_bytes <= shelf.budget


def _copy(holder: Holder, key: bytes, tier: Tier, storages: Storages, now: float) -> bool:
    """Whether a tier holds a checkpoint, after copying what it lacks of it from where that can be read."""
    store = holder.store
    while key in store.prompts.places and store.prompts.node(key).states:
        if store.prompts.node(key).states & tier.bit:
            return True
        try:
            state, pages = _brought(store, key, tier, storages)
        except Broken as broken:
            store = holder.update(_losing(broken, now))
        except OSError:  # the tier cannot take it: as good as no room
            return False
        else:
            return key in holder.update(_publishing(key, tier, state, pages, now)).shelves[tier].states
    return False


def _brought(
    store: Store, key: bytes, tier: Tier, storages: Storages
) -> tuple[Payload, dict[bytes, Payload]]:
    """A checkpoint's state and the pages that a tier lacks of it, read where they are and written there."""
    lacks = [(name, held) for name, held in _pages(store, key) if not held & tier.bit]
    state = _read(store, key, fastest(store.prompts.node(key).states), None, storages)
    pages = {name: _read(store, key, fastest(held), name, storages) for name, held in lacks}
    written = {name: storages[tier].write(page_name(name), page) for name, page in pages.items()}
    return storages[tier].write(state_name(key), state), written


def _losing(broken: Broken, now: float) -> Callable[[Store], Store]:
    return lambda store: store.lose(broken.key, broken.tier, now, broken.page)


def _publishing(
    key: bytes, tier: Tier, state: Payload, pages: Mapping[bytes, Payload], now: float
) -> Callable[[Store], Store]:
    return lambda store: store.copied(key, tier, state, pages, now)


def _read(store: Store, key: bytes, tier: Tier, page: bytes | None, storages: Storages) -> Payload:
    shelf = store.shelves.get(tier)
    try:
        if page is None:
            return storages[tier].read(state_name(key), shelf.states.get(key) if shelf else None)
        return storages[tier].read(page_name(page), shelf.pages.get(page) if shelf else None)
    except (OSError, ValueError) as error:
        raise Broken(key, tier, page, str(error)) from error


def _pages(store: Store, key: bytes) -> Iterator[tuple[bytes, int]]:
    """Names of the pages before a boundary, in order, and the tiers that hold each."""
    path = list(store.prompts.index(key).ancestors(store.prompts.places[key].node))
    return ((name, node.rows) for _, node in reversed(path) for name in node.names)


def state_name(key: bytes) -> str:
    """What storage calls a checkpoint's state."""
    return STATE + key.hex()


def page_name(name: bytes) -> str:
    """What storage calls a page."""
    return PAGE + name.hex()
