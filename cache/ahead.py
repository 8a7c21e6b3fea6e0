"""What to bring to a faster tier before it is asked for: a conversation's next turn can be expected."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from cache.payload import nbytes
from cache.shelf import Shelf
from cache.store import Store
from cache.tier import Tier


@runtime_checkable
class Expects(Protocol):
    """What a policy has, too, if it can tell how soon something is used."""

    def expected(self, key: bytes) -> float:
        """Uses a second that a held boundary will serve."""
        ...


class Ahead(NamedTuple):
    """A checkpoint to promote, how many bytes that moves, and the uses a second that are expected of it."""

    key: bytes
    nbytes: int
    expected: float


def ahead(store: Store, tier: Tier, num_bytes: int, now: float) -> tuple[Ahead, ...]:
    """Checkpoints that slower tiers hold and this one should, those that are expected soonest first. Changes nothing.

    A promotion saves the time that its bytes take to move, so it is worth what is expected of it, however large it is.
    Each has room here: free bytes, or those that the policy would give up first and of which less is expected;
    `make_room` demotes these before `promote` copies. Looks at all that slower tiers hold.

    Args:
        store: any version.
        tier: to promote to.
        num_bytes: most bytes to move in all.
        now: seconds.

    Returns:
        Nothing, where the tiers' policies are not `Expects`, as those that only know an order.
    """
    chosen: list[Ahead] = []
    for key, expected in _candidates(store, tier):
        source = next(
            shelf for at, shelf in sorted(store.shelves.items()) if at > tier and key in shelf.states
        )
        pages = {name: source.pages[name] for name in store.prompts.lacks(key, tier)}
        size = nbytes(source.states[key]) + sum(map(nbytes, pages.values()))
        if size > num_bytes:
            continue
        room = _with_room(store, tier, size, expected, now)
        after = room and room.copied(key, tier, source.states[key], pages, now)
        if after is None or key not in after.shelves[tier].states:
            break
        store, num_bytes = after, num_bytes - size
        chosen.append(Ahead(key, size, expected))
    return tuple(chosen)


def _with_room(store: Store, tier: Tier, num_bytes: int, expected: float, now: float) -> Store | None:
    """A store in which a tier has so many bytes free; None if that would take what is expected as soon."""
    shelf = store.shelves[tier]
    if shelf.nbytes + num_bytes <= shelf.budget:
        return store
    for victim in store.victims(tier, num_bytes, now):
        if victim in store.pinned:
            continue
        if not isinstance(shelf.policy, Expects) or shelf.policy.expected(victim) >= expected:
            return None
        store = store.drop(victim, tier, now)
        if store.shelves[tier].nbytes + num_bytes <= shelf.budget:
            return store
    return None


def _candidates(store: Store, tier: Tier) -> list[tuple[bytes, float]]:
    """What only slower tiers hold and anything is expected of, the soonest first."""
    found: dict[bytes, float] = {}
    for other, shelf in sorted(store.shelves.items()):
        if other > tier and isinstance(shelf.policy, Expects):
            for key in _only_there(shelf, store.shelves[tier], found):
                found[key] = shelf.policy.expected(key)
    soonest = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [(key, expected) for key, expected in soonest if expected > 0]


def _only_there(shelf: Shelf, here: Shelf, found: dict[bytes, float]) -> list[bytes]:
    return [key for key in shelf.states if key not in here.states and key not in found]
