"""Checkpoints from slower tiers, read whole or not at all on threads beside the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import NamedTuple

import numpy as np

from cache.payload import Payload
from cache.payload import nbytes as size
from cache.tier import Tier
from cache.tiers import page_name, state_name
from kda_jax.engine.object_storage import ObjectStorage
from kda_jax.engine.pages import PoolPages
from kda_jax.engine.portable import Portable, SlotState
from kda_jax.engine.work import Load
from transfer import Objects

THREADS = 4
Lost = list[tuple[Tier, bytes | None]]


class Read(NamedTuple):
    """What a load brought.

    Attributes:
        state: what goes into the slot; None if that lies in the pool, or something was lost.
        numbers: pages of the pool to write, the load's and the unfinished one.
        pieces: what they shall hold, as `Programs.write_pages` takes it.
        lost: what could not be read, as `Scheduler.loaded` takes it; empty if all is there.
        seconds: that it took, by tier, with the bytes that came.
    """

    state: SlotState | None
    numbers: tuple[int, ...]
    pieces: tuple[np.ndarray, ...]
    lost: Lost
    seconds: Mapping[Tier, tuple[int, float]]


class Loading:
    """Reads loads; what they brought is handed to the engine."""

    def __init__(self, portable: Portable, stores: Mapping[Tier, Objects], moved_pages: int) -> None:
        """
        Args:
            portable: makes of payloads what the memory takes.
            stores: of objects, by tier, for what the cache itself does not keep.
            moved_pages: pages of a piece, the programs'.
        """
        self._portable, self._stores, self._moved = portable, stores, moved_pages
        self._threads = ThreadPoolExecutor(THREADS, "kda-jax load")

    def begin(
        self, load: Load, namespace: bytes, timeout: float, loaded: Callable[[Load, Read], None]
    ) -> Future[None]:
        """Reads on a thread, and calls `loaded` there; reads from stores of objects end in `timeout` seconds."""

        def run() -> None:
            try:
                read = self.read(load, namespace, timeout)
            except Exception:  # as when the host has no room: nobody waits for what never comes
                tiers = {load.tier, *(source.tier for source in load.pages)} - {Tier.DEVICE}
                read = Read(None, (), (), [(tier, None) for tier in sorted(tiers)], {})
            loaded(load, read)

        return self._threads.submit(run)

    def read(self, load: Load, namespace: bytes, timeout: float) -> Read:
        """Reads all of a load, or says what is lost. Never raises for what a tier does."""
        wanted: dict[Tier, list[tuple[bytes | None, str, Payload | None]]] = {}
        for source in load.pages:
            wanted.setdefault(source.tier, []).append((source.name, page_name(source.name), source.kept))
        if not isinstance(load.kept, PoolPages):
            wanted.setdefault(load.tier, []).append((None, state_name(load.key), load.kept))
        state: SlotState | None = None
        read: dict[bytes, np.ndarray] = {}
        lost: Lost = []
        seconds: dict[Tier, tuple[int, float]] = {}
        for tier, parts in wanted.items():
            start, nbytes = monotonic(), 0
            payloads = self._payloads(
                tier, parts, namespace, timeout - sum(took for _, took in seconds.values())
            )
            for (page, _, _), payload in zip(parts, payloads):
                try:
                    if payload is None:
                        raise ValueError("it is not there")
                    if page is None:
                        state = self._portable.slot(load.boundary, payload)
                    else:
                        read[page] = self._portable.rows(payload)
                    nbytes += size(payload)
                except (ValueError, TypeError):
                    lost.append((tier, page))
            seconds[tier] = nbytes, monotonic() - start
        if lost:
            return Read(None, (), (), lost, seconds)
        numbers = [source.page for source in load.pages]
        rows = [read[source.name] for source in load.pages]
        if state is not None and state.tail is not None and load.tail is not None:
            numbers.append(load.tail)
            rows.append(state.tail)
        return Read(state, tuple(numbers), tuple(self._pieces(rows)), [], seconds)

    def close(self) -> None:
        """Waits for the reads that run, and cancels the others."""
        self._threads.shutdown(cancel_futures=True)

    def _pieces(self, rows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Pages side by side, the last piece filled up with any."""
        for at in range(0, len(rows), self._moved):
            piece = list(rows[at : at + self._moved])
            yield np.stack([*piece, *piece[-1:] * (self._moved - len(piece))])

    def _payloads(
        self,
        tier: Tier,
        parts: Sequence[tuple[bytes | None, str, Payload | None]],
        namespace: bytes,
        timeout: float,
    ) -> Sequence[Payload | None]:
        if tier not in self._stores:
            return [kept for _, _, kept in parts]
        if timeout <= 0:
            return [None] * len(parts)
        try:
            storage = ObjectStorage(self._stores[tier], namespace, timeout)
            return storage.read_all([name for _, name, _ in parts])
        except Exception:  # whatever a store does, it costs a hit and nothing else
            return [None] * len(parts)
