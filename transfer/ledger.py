"""What a store with a budget holds, and what goes when there is no room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic

from transfer.objects import Item, Put

Group = tuple[bool, str]


def group_of(key: str, group: str | None) -> Group:
    """What an object is dropped with: its group, or nothing else."""
    return (False, key) if group is None else (True, group)


@dataclass(slots=True)
class _Entry:
    nbytes: int
    group: Group
    there: bool


@dataclass(slots=True)
class _Members:
    keys: set[str] = field(default_factory=set)
    writing: int = 0


class Ledger:
    """Names and sizes, from any thread. Groups are dropped whole, the one that was used longest ago first.

    Bytes count from the moment that they are claimed until they are dropped, so a store that claims before it writes
    is never above its budget.
    """

    def __init__(self, budget_nbytes: int | None, drop: Callable[[str], None]) -> None:
        """`drop` gives an object's bytes back, or raises OSError and it stays. It is called with the lock held."""
        self._budget = budget_nbytes
        self._drop = drop
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[Group, _Members] = {}  # the order is that of use
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held and claimed."""
        with self._changed:
            return self._nbytes

    def claim(self, item: Item, keep: Collection[Group], until: float) -> Put | None:
        """Room for an object, for which other groups may be dropped. None if it is claimed: then `settle` follows.

        Waits while another thread writes an object of this name.

        Args:
            keep: groups that are not dropped for it, beside its own.
            until: when to give up (`monotonic`).
        """
        nbytes, group = item.nbytes, group_of(item.key, item.group)
        with self._changed:
            if not self._wait(item.key, until):
                return Put.LATE
            held = self._entries.get(item.key)
            if held:
                self._touch(held.group)
                return Put.HELD if held.nbytes == nbytes else Put.CONFLICT
            if not self._make_room(nbytes, {group, *keep}):
                return Put.FULL
            self._add(item.key, _Entry(nbytes, group, there=False))
            return None

    def settle(self, key: str, stored: bool) -> None:
        """Ends a claim."""
        with self._changed:
            entry = self._entries[key]
            entry.there = True
            self._groups[entry.group].writing -= 1
            if not stored:
                self._forget(key)
            self._changed.notify_all()

    def restore(self, key: str, nbytes: int, group: Group) -> None:
        """Enters what a store found when it was opened; the one last used comes last."""
        with self._changed:
            self._add(key, _Entry(nbytes, group, there=True))

    def use(self, key: str) -> int | None:
        """An object's length, and that it was used now; None if it is not there."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is None or not entry.there:
                return None
            self._touch(entry.group)
            return entry.nbytes

    def holds(self, key: str) -> bool:
        """Whether an object is there."""
        with self._changed:
            return key in self._entries and self._entries[key].there

    def remove(self, key: str, until: float) -> bool:
        """Drops an object, after another thread has written it. Whether it is gone."""
        with self._changed:
            return self._wait(key, until) and (key not in self._entries or self._dropped(key))

    def shrink(self) -> None:
        """Drops groups until the budget is kept, as far as that is possible."""
        with self._changed:
            self._make_room(0, set())

    def _wait(self, key: str, until: float) -> bool:
        def idle() -> bool:
            return key not in self._entries or self._entries[key].there

        return self._changed.wait_for(idle, max(0.0, until - monotonic()))

    def _make_room(self, nbytes: int, keep: Collection[Group]) -> bool:
        if self._budget is None or self._nbytes + nbytes <= self._budget:
            return True
        free = [group for group, members in self._groups.items() if group not in keep and not members.writing]
        most = sum(self._entries[key].nbytes for group in free for key in self._groups[group].keys)
        if self._nbytes - most + nbytes > self._budget:
            return False  # nothing is dropped in vain
        for group in free:
            if self._nbytes + nbytes <= self._budget:
                break
            for key in sorted(self._groups[group].keys):
                self._dropped(key)
        return self._nbytes + nbytes <= self._budget

    def _dropped(self, key: str) -> bool:
        try:
            self._drop(key)
        except OSError:
            return False
        self._forget(key)
        return True

    def _add(self, key: str, entry: _Entry) -> None:
        self._entries[key] = entry
        members = self._groups.setdefault(entry.group, _Members())
        members.keys.add(key)
        members.writing += not entry.there
        self._touch(entry.group)
        self._nbytes += entry.nbytes

    def _forget(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._groups[entry.group].keys.remove(key)
        if not self._groups[entry.group].keys:
            del self._groups[entry.group]
        self._nbytes -= entry.nbytes

    def _touch(self, group: Group) -> None:
        self._groups[group] = self._groups.pop(group)
