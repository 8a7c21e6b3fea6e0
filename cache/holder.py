"""One store for many threads: who reads has a version that does not change; changes come one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cache.store import Store


class Holder:
    """Holds the latest version of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    @property
    def store(self) -> Store:
        """The latest version. It stays as it is while others put and evict."""
        return self._store

    def update(self, change: Callable[[Store], Store]) -> Store:
        """Puts what `change` makes of the latest version in its place, and returns that.

        `change` runs alone, so it must be quick: no I/O. If it raises, nothing has changed.
        """
        with self._lock:
            self._store = change(self._store)
            return self._store
