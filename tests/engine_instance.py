"""One instance of the engine in its simulation: a scheduler, a device, and the laws that hold between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine_device import Device, HostBytes, cold, require, truth
from engine_setup import PAGE_NBYTES

from cache.holder import Holder
from cache.payload import Payload
from cache.retention.learned import Learned
from cache.retention.protocol import Kind
from cache.store import Store
from cache.tier import Tier
from kda_jax.engine.pages import Pages, PoolPages, Slots
from kda_jax.engine.request import Outcome, Stage
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.work import Load, Results, Work
from oldest_first import OldestFirst

if TYPE_CHECKING:
    from engine_simulation import World


def numbers(payload: Payload) -> tuple[int, ...]:
    """The pages of the pool that a payload of the device tier lies in."""
    assert isinstance(payload, PoolPages)
    return payload.pages


class Instance:
    """A scheduler and its device, in a world that has its time and its chances."""

    def __init__(self, world: World) -> None:
        self.world, self.setup, setup = world, world.setup, world.setup
        self.stepping, self.killed = False, False
        self.pages = Pages(setup.num_pages, PAGE_NBYTES)
        budget = {
            Tier.DEVICE: int(self.pages.capacity * setup.device) * PAGE_NBYTES,
            Tier.HOST: setup.host * PAGE_NBYTES,
        }
        sizes = {
            "state_nbytes": setup.sizes.state_pages * PAGE_NBYTES,
            "row_nbytes": PAGE_NBYTES // setup.sizes.rows,
        }
        policy = Learned() if setup.learned else OldestFirst(creation=setup.creation)
        self.holder = Holder(Store.empty(budget, policy, page=setup.sizes.rows, share=1.0, **sizes))
        slots = Slots(setup.num_slots)
        self.scheduler = Scheduler(self.holder, self.pages, slots, setup.sizes, setup.creation)
        self.device = Device(self.scheduler, setup.num_pages, setup.num_slots, world.remote.objects)

    def after(self, delay: float, what: str, event: Callable[[], None]) -> None:
        """An event of this instance, while it lives."""
        self.world.after(delay, what, lambda: self.happen(event))

    def happen(self, event: Callable[[], None]) -> None:
        if not self.killed:
            self.world.touched = self
            event()

    def cancel(self, id: int) -> None:
        """Who asked goes away."""
        had_ended = id in self.world.outcomes
        require(self.scheduler.cancel(id) != had_ended, "cancel says whether it ended a request")
        self.take_report()
        self.wake()

    def wake(self) -> None:
        """A step comes soon."""
        if not self.stepping:
            self.stepping = True
            self.after(self.world.streams["time"].random() * 0.1, "step", self.step)

    def step(self) -> None:
        work = self.scheduler.step(self.world.now)
        self.take_report()
        self.order(work)
        for load in work.loads:
            self.begin(load)
        computing = work.snapshots, work.zeros, work.restores, work.chunks, work.rows
        parts = {each.id for part in computing for each in part}
        chunks = [(chunk.id, chunk.start, len(chunk.tokens), chunk.table) for chunk in work.chunks]
        self.world.note("work", work._replace(chunks=(), loads=()), chunks, [load[:5] for load in work.loads])
        for name, part in zip(work._fields, work):
            self.world.happened[name] += len(part)
        self.world.happened["preempted"] += sum(
            not self.scheduler.live[each.id].outcome for each in work.snapshots
        )
        self.world.happened["drafted"] += sum(len(row.drafts) for row in work.rows)
        made = [snapshot.kind for chunk in work.chunks for snapshot in chunk.snapshots]
        self.world.happened["filled"] += made.count(Kind.MISSING)
        everything = self.world.fault("step")
        failing = frozenset(id for id in sorted(parts) if self.world.fault("row") or everything)
        early = self.device.execute(work, failing) if self.world.streams["time"].random() < 0.3 else None
        delay = self.world.streams["time"].random() if parts else 0.0
        self.after(delay, "done", lambda: self.done(work, failing, early))

    def done(self, work: Work, failing: frozenset[int], early: Results | None) -> None:
        results = early or self.device.execute(work, failing)
        self.world.happened["accepted"] += sum(each.accepted for each in results.sampled.values())
        self.scheduler.done(work, results, self.world.now)
        self.stepping = False
        self.take_report()
        waits = [live.request.deadline for live in self.scheduler.live.values() if live.request.deadline]
        if not work.empty:
            self.wake()
        elif waits and min(waits) > self.world.now:
            self.after(min(waits) - self.world.now, "tick", self.wake)

    def begin(self, load: Load) -> None:
        """A load writes some pages at once and the others when it is over."""
        fails, count = self.world.fault("load"), self.world.streams["time"].randint(0, len(load.pages))
        self.device.load(load, count, whole=False)
        self.after(self.world.streams["time"].expovariate(0.3), "loaded", lambda: self.end(load, fails))

    def end(self, load: Load, fails: bool) -> None:
        """A load is over; it fails by chance, or because the remote store lost something since it was found."""
        lost = self.device.load(load, len(load.pages), whole=not fails)
        if fails and not lost:
            parts = [(load.tier, None), *((source.tier, source.name) for source in load.pages)]
            parts = [part for part in parts if part[0] is not Tier.DEVICE]
            lost = [self.world.streams["time"].choice(parts)]
        self.world.happened["load failed"] += bool(lost)
        self.world.happened["remote loads"] += any(source.tier is Tier.REMOTE for source in load.pages)
        self.scheduler.loaded(load.id, load.attempt, lost, self.world.now)
        self.take_report()
        self.wake()

    def take_report(self) -> None:
        report = self.scheduler.report()
        for id, token in report.tokens:
            request = self.world.asked[id]
            self.world.answers[id].append(token)
            expected = cold(request.namespace, tuple(request.tokens.tolist()), request.max_new_tokens)
            count = len(self.world.answers[id])
            require(
                expected[:count] == tuple(self.world.answers[id]), "tokens are those of an undisturbed run"
            )
            require(id not in self.world.outcomes, "nothing comes after the end")
        for id, outcome in report.ended:
            require(id not in self.world.outcomes, "a request ends once")
            self.world.outcomes[id] = outcome
            self.world.note(str(outcome), id)
            request = self.world.asked[id]
            if outcome is Outcome.FINISHED:
                expected = cold(request.namespace, tuple(request.tokens.tolist()), request.max_new_tokens)
                require(
                    len(self.world.answers[id]) == len(expected), "a request that finishes has all its tokens"
                )
                self.world.histories.append(
                    (request.namespace, (*request.tokens.tolist(), *self.world.answers[id]))
                )
        for key in report.published:
            self.world.happened["published"] += 1
            if self.world.streams["copies"].random() < 0.6:
                self.after(self.world.streams["copies"].random(), "copy", lambda key=key: self.copy(key))

    def copy(self, key: bytes) -> None:
        """A checkpoint is written through to the host and to the remote store, if it is there still."""
        store = self.holder.store
        device, setup = store.shelves[Tier.DEVICE], self.setup
        if key not in device.states:
            return
        names = self.prompt(store, key)[2]
        content = {name: tuple(self.device.pages[numbers(device.pages[name])[0]]) for name in names}
        state = self.device.content(device.states[key])
        if key not in store.shelves[Tier.HOST].states:
            pages = {
                name: HostBytes(PAGE_NBYTES, content[name]) for name in store.prompts.lacks(key, Tier.HOST)
            }
            kept = HostBytes(setup.sizes.state_pages * PAGE_NBYTES, state)
            del store, device  # an old version keeps pages
            self.holder.update(lambda store: store.copied(key, Tier.HOST, kept, pages, self.world.now))
        self.world.remote.put(key, state, content)

    def laws(self) -> None:
        scheduler, store = self.scheduler, self.holder.store
        shelf = store.shelves[Tier.DEVICE]
        holders, slots = [0] * self.setup.num_pages, []
        for live in scheduler.live.values():
            for page in (*live.table, *live.saving):
                holders[page] += 1
            if live.slot is not None:
                slots.append(live.slot)
            idle = live.stage is Stage.WAITING
            require(
                idle == (live.slot is None) and not (idle and live.table), "who waits has no slot and no page"
            )
        for payload in (*shelf.states.values(), *shelf.pages.values()):
            for page in numbers(payload):
                holders[page] += 1
        if scheduler.in_flight:
            for chunk in scheduler.in_flight.chunks:
                for snapshot in chunk.snapshots:
                    for page in snapshot.pages:
                        holders[page] += 1
        free = [page for page in range(1, self.setup.num_pages) if not holders[page]]
        require(self.pages.free == len(free) and holders == self.pages.holders, "pages are conserved")
        require(sorted(self.pages._free) == free, "free pages are those without a holder")
        given = sorted([*slots, *scheduler.holdings.slots._free])
        require(given == list(range(1, self.setup.num_slots)), "slots are conserved")
        pins = Counter(live.pinned for live in scheduler.live.values() if live.pinned)
        require(dict(store.pinned) == pins, "pins are those of requests")
        if scheduler.in_flight is None or self.world.count % 8 == 0:
            self.contents(store)

    def order(self, work: Work) -> None:
        """A step keeps to the budget, the grid, the deadlines, and the order of requests."""
        sizes, live = self.setup.sizes, self.scheduler.live
        decoded = sum(1 + len(row.drafts) for row in work.rows)
        spent = decoded + sum(len(chunk.tokens) for chunk in work.chunks)
        require(spent <= sizes.budget, "a step computes no more tokens than its budget")
        prefilling = any(each.stage is Stage.PREFILLING and not each.outcome for each in live.values())
        require(
            not (prefilling and decoded > len(work.rows)) or decoded + sizes.grid <= sizes.budget,
            "drafts leave a prefill its step",
        )
        require(all(len(row.drafts) <= sizes.drafts for row in work.rows), "drafts are no more than may be")
        for chunk in work.chunks:
            stop = chunk.start + len(chunk.tokens)
            at_end = stop == len(live[chunk.id].tokens)
            require(
                at_end == chunk.samples and (at_end or stop % sizes.grid == 0), "prefills are cut on the grid"
            )
            require(len(chunk.snapshots) <= sizes.snapshots, "a chunk makes no more checkpoints than it may")
        begun = {each.id for part in (work.restores, work.loads) for each in part}
        queue = Stage.WAITING, Stage.SAVING
        waiting = [each.rank for each in live.values() if each.stage in queue and not each.outcome]
        require(
            all(live[id].rank < rank for id in begun for rank in waiting),
            "who is first in the queue starts first",
        )
        late = (each.request.deadline for each in live.values() if not each.outcome)
        require(
            all(deadline is None or deadline > self.world.now for deadline in late),
            "no request outlives its deadline",
        )
        computing = [
            each.id for part in (work.snapshots, work.chunks, work.rows, work.loads) for each in part
        ]
        require(len(computing) == len(set(computing)), "a request does one thing in a step")

    def contents(self, store: Store) -> None:
        """What lies under a key is what the model has at its tokens."""
        rows = self.setup.sizes.rows
        for tier, shelf in store.shelves.items():
            seen: set[bytes] = set()
            for key, kept in shelf.states.items():
                namespace, tokens, names = self.prompt(store, key)
                state, all_rows = truth(namespace, tokens)
                whole = len(all_rows) // rows * rows
                require(
                    self.device.content(kept) == (state, all_rows[whole:]),
                    f"a state is that of its key: {tier}",
                )
                for number, name in enumerate(names):
                    page = shelf.pages[name]
                    if name in seen:
                        continue
                    seen.add(name)
                    got = page.content if isinstance(page, HostBytes) else self.device.pages[numbers(page)[0]]
                    expected = all_rows[number * rows : (number + 1) * rows]
                    require(
                        isinstance(got, list | tuple) and tuple(got) == expected, "a page is that of its name"
                    )

    def prompt(self, store: Store, key: bytes) -> tuple[bytes, bytes, list[bytes]]:
        """What a key stands for: namespace, tokens, and the names of the pages before it."""
        if key not in self.world.prompts:
            place, index = store.prompts.places[key], store.prompts.index(key)
            path = [node for _, node in index.ancestors(place.node)][::-1]
            tokens = b"".join(node.edge.astype("<i4").tobytes() for node in path)
            self.world.prompts[key] = place.namespace, tokens, [name for node in path for name in node.names]
        return self.world.prompts[key]

    def rest(self) -> None:
        """All is as it was when everything has ended."""
        require(not self.scheduler.live, "every request ends")
        require(not self.holder.store.pinned, "nothing stays pinned")
        self.holder.update(lambda store: store.evict(Tier.DEVICE, 10**9, self.world.now))
        require(self.pages.free == self.pages.capacity, "all pages come back")
        require(self.scheduler.holdings.slots.free == self.setup.num_slots - 1, "all slots come back")
