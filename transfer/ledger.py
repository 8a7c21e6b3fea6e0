"""What a store with a budget holds, and what goes when there is no room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from transfer.objects import Item, Put

Group = tuple[Literal["key", "group"], str]


def group_of(key: str, group: str | None) -> Group:
    """What an object is dropped with: all of its group, or nothing else."""
    return ("key", key) if group is None else ("group", group)


@dataclass(slots=True)
class Entry:
    """An object.

    Attributes:
        nbytes: its length.
        cost: what it takes of the budget.
        group: what it is dropped with.
        there: else it is being written.
    """

    nbytes: int
    cost: int
    group: Group
    there: bool


class Ledger:
    """Names and sizes, from any thread. Groups are dropped whole, the one used longest ago first.

    Bytes count from the moment that they are claimed until they are dropped, so a store that claims before it writes
    is never above its budget.
    """

    def __init__(
        self,
        budget_nbytes: int | None,
        drop: Callable[[str], None],
        evicted: Callable[[int], None],
        cost: Callable[[str, int, str | None], int],
    ) -> None:
        """Without an object.

        Args:
            budget_nbytes: the most that all objects may cost; None for no limit.
            drop: gives an object's bytes back, or raises OSError and it stays. Called with the lock held.
            evicted: told the length of each object that was dropped for others. Called with the lock held.
            cost: bytes that an object of this key, length and group takes of the budget.

        Raises:
            ValueError: for a budget that is not positive.
        """
        if budget_nbytes is not None and budget_nbytes <= 0:
            raise ValueError(f"{budget_nbytes=} must be positive bytes, or None for no limit")
        self._budget = budget_nbytes
        self._drop = drop
        self._evicted = evicted
        self._cost = cost
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._groups: dict[Group, set[str]] = {}  # in order of use
        self._total = 0

    def restore(self, key: str, nbytes: int, group: str | None) -> None:
        """Enters what was there before; what was used last comes last."""
        with self._changed:
            self._add(key, nbytes, group, there=True)

    def shrink(self) -> None:
        """Drops groups until the budget is kept, as far as they can be dropped."""
        with self._changed:
            self._make_room(0, set())

    def claim(self, item: Item, keep: Collection[Group], until: float) -> Put | None:
        """Room for an object, for which other groups may be dropped. None if it is claimed: then `settle` follows.

        Waits while another thread writes an object of this name.

        Args:
            keep: groups that are not dropped for it.
            until: when to give up (`monotonic`).
        """
        with self._changed:
            if not self._wait(item.key, until):
                return Put.LATE
            held = self._entries.get(item.key)
            if held:
                self._use(held.group)
                return Put.HELD if held.nbytes == item.nbytes else Put.CONFLICT
            if not self._make_room(self._cost(item.key, item.nbytes, item.group), keep):
                return Put.FULL
            self._add(item.key, item.nbytes, item.group, there=False)
            return None

    def settle(self, key: str, stored: bool) -> None:
        """Ends a claim."""
        with self._changed:
            self._entries[key].there = True
            if not stored:
                self._forget(key)
            self._changed.notify_all()

    def use(self, key: str) -> int | None:
        """An object's length, and that it was used now; None if it is not there."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is None or not entry.there:
                return None
            self._use(entry.group)
            return entry.nbytes

    def holds(self, key: str) -> bool:
        """Whether an object is there."""
        with self._changed:
            return key in self._entries and self._entries[key].there

    def remove(self, key: str, until: float, only_if: Callable[[str, int], bool] | None = None) -> bool:
        """Drops an object, if `only_if` (key, length) says so; waits while it is written. Whether it is gone."""
        with self._changed:
            if not self._wait(key, until):
                return False
            entry = self._entries.get(key)
            if entry is None:
                return True
            return (only_if is None or only_if(key, entry.nbytes)) and self._dropped(key)

    def _wait(self, key: str, until: float) -> bool:
        def idle() -> bool:
            return key not in self._entries or self._entries[key].there

        return self._changed.wait_for(idle, max(0.0, until - monotonic()))

    def _make_room(self, cost: int, keep: Collection[Group]) -> bool:
        if self._budget is None or self._total + cost <= self._budget:
            return True
        free = [
            (group, sorted(keys))
            for group, keys in self._groups.items()
            if group not in keep and all(self._entries[key].there for key in keys)
        ]
        most = sum(self._entries[key].cost for _, keys in free for key in keys)
        if self._total - most + cost > self._budget:
            return False  # nothing is dropped in vain
        for _, keys in free:
            for key in keys:
                nbytes = self._entries[key].nbytes
                if self._dropped(key):
                    self._evicted(nbytes)
            if self._total + cost <= self._budget:
                return True
        return False

    def _dropped(self, key: str) -> bool:
        try:
            self._drop(key)
        except OSError:
            return False
        self._forget(key)
        return True

    def _add(self, key: str, nbytes: int, group: str | None, there: bool) -> None:
        entry = Entry(nbytes, self._cost(key, nbytes, group), group_of(key, group), there)
        self._entries[key] = entry
        self._groups.setdefault(entry.group, set()).add(key)
        self._use(entry.group)
        self._total += entry.cost

    def _forget(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._groups[entry.group].remove(key)
        if not self._groups[entry.group]:
            del self._groups[entry.group]
        self._total -= entry.cost

    def _use(self, group: Group) -> None:
        self._groups[group] = self._groups.pop(group)
