"""Drafts behind the rows of a step: as many as budget, pages and requests have room for."""

from __future__ import annotations

from collections.abc import Sequence

from kda_jax.engine.holdings import Holdings
from kda_jax.engine.request import Live, Stage
from kda_jax.engine.work import Row

READ = 1024
"""Tokens that drafters read in a step, half a millisecond's: who has a long text has no drafts before it is read."""


def with_drafts(holdings: Holdings, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with their drafts.

    Called when all rows have their pages and requests have started, so that a guess takes nothing from anyone: no
    checkpoint is evicted for it, nobody is preempted, and a prefill has a step of the grid left.
    """
    if not holdings.sizes.drafts:
        return tuple(rows)
    _read(holdings)
    spare, drafted = holdings.sizes.budget - len(rows), []
    if holdings.ordered(Stage.PREFILLING):
        spare -= holdings.sizes.grid
    for row in rows:
        live = holdings.live[row.id]
        drafts = _drafts(holdings, live, spare)
        spare -= len(drafts)
        drafted.append(row._replace(drafts=drafts, table=tuple(live.table)))
    return tuple(drafted)


def _read(holdings: Holdings) -> None:
    """Has drafters read on, of prompts that are computed or loaded too: who lacks least first."""
    lacking = [
        (len(live.tokens) - live.drafter.count, live.drafter, live.tokens)
        for live in holdings.ordered(Stage.LOADING, Stage.PREFILLING, Stage.DECODING)
        if live.drafter is not None
    ]
    left = READ
    for count, drafter, tokens in sorted(lacking, key=lambda each: each[0]):
        drafter.read(tokens, left)
        left -= min(left, count)


def _drafts(holdings: Holdings, live: Live, spare: int) -> tuple[int, ...]:
    """Up to `spare` tokens, so few that the request may generate them and the one behind them."""
    most = min(holdings.sizes.drafts, spare, live.request.max_new_tokens - live.generated - 1)
    if live.drafter is None or live.drafter.count < len(live.tokens) or most < 1:
        return ()
    drafts = live.drafter.propose(live.tokens, most)
    missing = holdings.pages_for(live.computed + 1 + len(drafts)) - len(live.table)
    for _ in range(missing):
        live.table += holdings.pool.pages.take(1) or ()
    return drafts[: len(live.table) * holdings.sizes.rows - live.computed - 1]
