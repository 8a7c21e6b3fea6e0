"""The chunks of a step: as much of prompts as its budget allows, with the checkpoints on their way."""

from __future__ import annotations

from collections.abc import Iterable

from cache.placement import Placed
from cache.retention.protocol import Kind
from kda_jax.engine.holdings import Holdings
from kda_jax.engine.request import Live, Stage
from kda_jax.engine.work import Chunk, Snapshot


def prefill_chunks(holdings: Holdings, budget: int, now: float) -> tuple[Chunk, ...]:
    """Chunks of prefills in their order, until `budget` tokens are spent; one ends on the grid or with its prompt."""
    sizes, chunks = holdings.sizes, []
    for live in holdings.ordered(Stage.PREFILLING):
        start, end = live.computed, len(live.tokens)
        stop = end if end - start <= budget else (start + budget) // sizes.grid * sizes.grid
        if stop <= start:
            break
        stops = [placed for placed in live.stops if start < placed.boundary <= stop]
        if len(stops) > sizes.snapshots:
            stops = stops[: sizes.snapshots]
            stop = stops[-1].boundary
        if live.loaded is not None and len(stops) < sizes.snapshots:
            stops.insert(0, Placed(live.loaded, Kind.MISSING))
        live.loaded = None
        assert live.slot is not None
        snapshots = _snapshots(holdings, live, stops, now)
        tokens, table = live.tokens[start:stop], tuple(live.table)
        chunks.append(Chunk(live.request.id, live.slot, start, tokens, table, snapshots, stop == end))
        budget -= stop - start
    return tuple(chunks)


def _snapshots(holdings: Holdings, live: Live, stops: Iterable[Placed], now: float) -> tuple[Snapshot, ...]:
    """Those checkpoints of a chunk that there is room for."""
    assert live.slot is not None
    snapshots = []
    for boundary, kind in stops:
        pages = holdings.state_pages(now)
        if pages:
            snapshots.append(Snapshot(live.request.id, live.slot, boundary, kind, pages, tuple(live.table)))
    return tuple(snapshots)
