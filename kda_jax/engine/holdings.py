"""What each request holds: its pages, its slot, its pin; and how it gets and gives up any of them."""

from __future__ import annotations

from kda_jax.engine.pages import Slots
from kda_jax.engine.pool import Pool
from kda_jax.engine.request import Live, Stage
from kda_jax.engine.sizes import Sizes


class Holdings:
    """The requests there are, in their order, and what they hold of the pool and of the slots."""

    def __init__(self, pool: Pool, slots: Slots, sizes: Sizes) -> None:
        self.pool, self.slots, self.sizes = pool, slots, sizes
        self.live: dict[int, Live] = {}

    @property
    def queued(self) -> int:
        """Tokens of requests that wait."""
        return sum(len(live.tokens) for live in self.live.values() if live.stage is Stage.WAITING)

    def last(self, live: Live, below: int | None = None) -> Live | None:
        """Who runs, comes last and behind `live` and can be preempted, of a priority under `below`."""
        stages = Stage.PREFILLING, Stage.DECODING
        running = [other for other in self.ordered(*stages) if not other.busy and other.rank > live.rank]
        if below is not None:
            running = [other for other in running if other.request.priority < below]
        return running[-1] if running else None

    def preempt(self, live: Live, now: float) -> None:
        """Its state becomes a checkpoint, where there is room for one, and it waits."""
        pages = self.state_pages(now) if live.computed else None
        if pages is None:
            self.back(live)
        else:
            live.stage, live.saving = Stage.SAVING, pages

    def back(self, live: Live) -> None:
        """A request gives up its pages and its slot, and waits."""
        self.release(live)
        live.stage, live.computed, live.loaded = Stage.WAITING, 0, None

    def release(self, live: Live) -> None:
        """A request gives up all that it holds."""
        self.unpin(live)
        self.pool.pages.give_back((*live.table, *live.saving))
        live.table, live.saving = [], ()
        if live.slot is not None:
            self.slots.give_back(live.slot)
        live.slot = None

    def room(self, count: int, live: Live, now: float) -> bool:
        """Whether `count` pages are free, after evicting what nobody pins but requests that wait behind `live`."""

        def let_go() -> bool:
            waiting = [
                other for other in self.ordered(Stage.WAITING) if other.pinned and other.rank > live.rank
            ]
            if waiting:
                self.unpin(waiting[-1])
            return bool(waiting)

        return self.pool.room(count, now, let_go)

    def state_pages(self, now: float) -> tuple[int, ...] | None:
        """Pages for a state, where there is room: nobody has to wait for a checkpoint."""
        count = self.sizes.state_pages
        return self.pool.pages.take(count) if self.pool.room(count, now) else None

    def pages_for(self, tokens: int) -> int:
        """Pages that so many rows take."""
        return -(-tokens // self.sizes.rows)

    def pin(self, live: Live, key: bytes | None) -> None:
        """Pins a boundary for a request, in place of the one before; one that only a remote store knows has no pin."""
        key = key if key in self.pool.holder.store.prompts.places else None
        if key is not None:
            self.pool.holder.update(lambda store: store.pin(key))
        self.unpin(live)
        live.pinned = key

    def unpin(self, live: Live) -> None:
        """Gives back the pin of a request, if it has one."""
        key, live.pinned = live.pinned, None
        if key is not None:
            self.pool.holder.update(lambda store: store.unpin(key))

    def ordered(self, *stages: Stage) -> list[Live]:
        """Requests in these stages that have not ended, in order; with those that ended and are saved."""
        return sorted(
            (
                live
                for live in self.live.values()
                if live.stage in stages and (not live.outcome or live.stage is Stage.SAVING)
            ),
            key=lambda live: live.rank,
        )
