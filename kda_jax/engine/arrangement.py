"""How an engine's parts are made to fit each other."""

from __future__ import annotations

from dataclasses import dataclass

from cache.retention.protocol import Policy
from cache.store import Store
from cache.tier import Tier
from kda_jax.engine.memory import Layout
from kda_jax.engine.programs import Programs
from kda_jax.engine.sizes import Sizes
from kda_jax.forward import SplitModel, config_of, dtype_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The sizes that an engine is asked for; see `Engine`."""

    slots: int
    nbytes: int
    max_tokens: int | None
    budget: int
    page_rows: int
    host_nbytes: int
    drafts: int

    def layout(self, parts: SplitModel) -> Layout:
        """Of the device's memory.

        Raises:
            ValueError: for too few bytes.
        """
        return Layout.within(
            config_of(parts),
            dtype_of(parts[1]),
            nbytes=self.nbytes,
            num_slots=self.slots + 1,
            page_rows=self.page_rows,
            max_tokens=self.max_tokens,
        )

    def sizes(self, layout: Layout) -> Sizes:
        """Of the scheduler. What waits is counted by the engine, whose callers are on other threads."""
        return Sizes(
            rows=self.page_rows,
            state_pages=layout.state_pages + 1,
            budget=self.budget,
            queued=2**62,
            drafts=self.drafts,
        )

    def programs(self, parts: SplitModel, layout: Layout, given: Programs | None) -> Programs:
        """Those that are given, or new ones, not compiled yet.

        Raises:
            ValueError: if those that are given are of other sizes.
        """
        if given is None:
            cuts = self.sizes(layout).snapshots
            return Programs(parts, layout, most_tokens=self.budget, most_cuts=cuts, most_drafts=self.drafts)
        drafts = max((1, *given.widths)) - 1
        if given.layout != layout or given.chunks[-1] < self.budget or drafts < self.drafts:
            raise ValueError(
                f"the programs are for chunks up to {given.chunks[-1]}, {drafts} drafts and {given.layout}, asked are "
                f"{self.budget}, {self.drafts} and {layout}: give none, and they are compiled"
            )
        return given

    def store(self, layout: Layout, policy: Policy) -> Store:
        """An empty one, whose device tier is the pool."""
        budgets = {Tier.DEVICE: (layout.num_pages - 1) * layout.page_nbytes}
        if self.host_nbytes:
            budgets[Tier.HOST] = self.host_nbytes
        return Store.empty(
            budgets,
            policy,
            state_nbytes=layout.state_pages * layout.page_nbytes,
            row_nbytes=layout.page_nbytes // self.page_rows,
            page=self.page_rows,
        )
