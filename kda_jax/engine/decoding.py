"""The rows of a step: requests that decode, each with a page to write to."""

from __future__ import annotations

from kda_jax.engine.holdings import Holdings
from kda_jax.engine.request import Live, Stage
from kda_jax.engine.work import Row


def decode_rows(holdings: Holdings, now: float) -> list[Row]:
    """A row of every request that decodes and has a page to write to, in their order.

    Args:
        holdings: the requests; for who lacks a page, who comes last is preempted.
        now: seconds.
    """
    rows = []
    for live in holdings.ordered(Stage.DECODING):
        if live.stage is Stage.DECODING and _has_page(holdings, live, now):
            assert live.slot is not None
            token = int(live.tokens[live.computed])
            rows.append(Row(live.request.id, live.slot, live.computed, token, tuple(live.table)))
    return rows


def _has_page(holdings: Holdings, live: Live, now: float) -> bool:
    """Whether the next row has a page; if not, who is last makes room, and that takes a step."""
    if live.computed < len(live.table) * holdings.sizes.rows:
        return True
    while True:
        last = holdings.last(live)
        spare = holdings.sizes.state_pages if last else 0  # for the state of who is preempted
        if holdings.room(1 + spare, live, now):
            break
        holdings.preempt(last or live, now)
        if last is None:  # who is before him needs the pages
            return False
        if last.stage is Stage.SAVING:
            if not holdings.room(1, live, now):
                return False
            break
    pages = holdings.pool.pages.take(1)
    assert pages is not None
    live.table += pages
    return True
