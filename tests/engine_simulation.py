"""A scheduler's life with faults, by seed: one heap of events, the laws after every one, and calm at the end.

`python tests/engine_simulation.py --events 1000000` runs seeds until so many events have passed.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_device import VOCAB, Device, HostBytes, cold, require, truth

from cache.holder import Holder
from cache.payload import Payload
from cache.retention.protocol import Creation, Kind
from cache.store import Store
from cache.tier import Tier
from kda_jax.engine.pages import Pages, PoolPages, Slots
from kda_jax.engine.request import Outcome, Overloaded, Request, Stage
from kda_jax.engine.scheduler import Scheduler
from kda_jax.engine.sizes import Sizes
from kda_jax.engine.work import Load, Results, Work
from oldest_first import OldestFirst

NAMESPACES = (b"a" * 32, b"b" * 32)
PAGE_NBYTES = 64


def numbers(payload: Payload) -> tuple[int, ...]:
    """The pages of the pool that a payload of the device tier lies in."""
    assert isinstance(payload, PoolPages)
    return payload.pages


class Setup(NamedTuple):
    """What a seed decides before anything happens."""

    sizes: Sizes
    num_pages: int
    num_slots: int
    device: float
    """Part of the pool that checkpoints may take."""
    host: int
    """Pages of the host tier."""
    creation: Creation
    requests: int
    longest: int
    most_new: int
    rates: dict[str, float]
    """Of faults by their kind; some are wholly off."""

    @classmethod
    def draw(cls, seed: int) -> Setup:
        random_ = random.Random(f"setup {seed}")
        choose, chance = random_.choice, random_.random
        grid, slots = choose([1, 2, 4]), choose([2, 3, 5])
        rows, state_pages = choose([1, 2, 3, 4]), choose([1, 1, 2, 4])
        longest, most_new = choose([6, 12, 30]), choose([1, 4, 12])
        least = -(-(longest + most_new) // rows)  # pages of the largest request, and not one more
        kinds = frozenset(kind for kind in Kind if chance() < 0.8)
        rates = {
            kind: choose([0.0, rate, rate, 5 * rate])
            for kind, rate in {
                "step": 0.01,
                "row": 0.01,
                "load": 0.1,
                "cancel": 0.05,
                "deadline": 0.05,
            }.items()
        }
        return cls(
            sizes=Sizes(
                rows=rows,
                state_pages=state_pages,
                budget=grid + slots - 1 + choose([0, 1, 5, 40]),
                grid=grid,
                snapshots=choose([1, 2, 4]),
                queued=choose([40, 10**6]),
            ),
            num_pages=1 + least + choose([0, 0, 1, 3, 10, 60]),
            num_slots=slots,
            device=choose([1.0, 1.0, 0.5]),
            host=choose([0, 20, 200]),
            creation=Creation(kinds=kinds, interval=choose([0, 0, 4]), before_end=choose([(), (2,)])),
            requests=choose([10, 40]),
            longest=longest,
            most_new=most_new,
            rates=rates,
        )


class World:
    """One instance and those who use it."""

    def __init__(self, seed: int, spared: frozenset[str] = frozenset()) -> None:
        """`spared` names faults that do not happen this time."""
        self.seed, self.spared, self.setup = seed, spared, Setup.draw(seed)
        setup = self.setup
        self.streams = {
            name: random.Random(f"{name} {seed}") for name in ("time", "tie", "work", "copies", *setup.rates)
        }
        self.pages = Pages(setup.num_pages, PAGE_NBYTES)
        budget = {
            Tier.DEVICE: int(self.pages.capacity * setup.device) * PAGE_NBYTES,
            Tier.HOST: setup.host * PAGE_NBYTES,
        }
        sizes = {
            "state_nbytes": setup.sizes.state_pages * PAGE_NBYTES,
            "row_nbytes": PAGE_NBYTES // setup.sizes.rows,
        }
        policy = OldestFirst(creation=setup.creation)
        self.holder = Holder(Store.empty(budget, policy, page=setup.sizes.rows, share=1.0, **sizes))
        slots = Slots(setup.num_slots)
        self.scheduler = Scheduler(self.holder, self.pages, slots, setup.sizes, setup.creation)
        self.device = Device(self.scheduler, setup.num_pages, setup.num_slots)
        self.heap: list[tuple[float, float, int, str, Callable[[], None]]] = []
        self.now, self.count, self.calm, self.stepping = 0.0, 0, False, False
        self.asked: dict[int, Request] = {}
        self.answers: dict[int, list[int]] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.prompts: dict[bytes, tuple[bytes, bytes, list[bytes]]] = {}
        self.histories: list[tuple[bytes, tuple[int, ...]]] = []
        self.happened: Counter[str] = Counter()
        self.faults: list[str] = []
        self.drawn: Counter[str] = Counter()
        self.trace = hashlib.blake2b(digest_size=16)

    def run(self) -> World:
        """From the first request until all have ended, and a while longer."""
        at = 0.0
        for id in range(self.setup.requests):
            at += self.streams["time"].expovariate(0.5)
            self.after(at, "arrival", lambda id=id: self.arrive(id))
        while self.heap:
            self.now, _, _, what, event = heapq.heappop(self.heap)
            self.count += 1
            self.note(what)
            event()
            self.laws()
            if what == "arrival" and len(self.asked) == self.setup.requests:
                self.calm, self.bound = True, self.count + 4000
            require(not self.calm or self.count < self.bound, "every request ends when faults have stopped")
        self.rest()
        return self

    # Time and chance

    def after(self, delay: float, what: str, event: Callable[[], None]) -> None:
        tie = self.streams["tie"].random()
        heapq.heappush(self.heap, (self.now + delay, tie, self.drawn["event"], what, event))
        self.drawn["event"] += 1

    def fault(self, kind: str) -> bool:
        """Whether one happens now."""
        happens = self.streams[kind].random() < self.setup.rates[kind]
        self.drawn[kind] += 1
        name = f"{kind} {self.drawn[kind]}"
        if not happens or self.calm or name in self.spared:
            return False
        self.faults.append(name)
        return True

    def note(self, *what: Any) -> None:
        self.trace.update(repr((self.now, what)).encode())
        self.happened[str(what[0])] += 1

    # Those who ask

    def arrive(self, id: int) -> None:
        work = self.streams["work"]
        namespace, prompt = work.choice(NAMESPACES), ()
        if self.histories and work.random() < 0.7:
            namespace, prompt = work.choice(self.histories[-8:])
            if work.random() < 0.4:
                prompt = prompt[: work.randint(0, len(prompt))]
        prompt = prompt[: self.setup.longest - 1]
        more = work.choice([0, 1, 2, self.setup.longest])
        prompt += tuple(work.randrange(VOCAB) for _ in range(min(more, self.setup.longest - len(prompt))))
        prompt = prompt or (0,)
        patience = work.expovariate(0.05)
        request = Request(
            id=id,
            namespace=namespace,
            tokens=np.array(prompt, np.int32),
            max_new_tokens=work.randint(1, self.setup.most_new),
            priority=work.choice([0, 0, 0, 1, 2]),
            deadline=self.now + patience if self.fault("deadline") else None,
        )
        self.asked[id], self.answers[id] = request, []
        self.histories.append((namespace, prompt))
        try:
            self.scheduler.submit(request)
        except Overloaded:
            require(self.scheduler.holdings.queued > 0, "nobody is turned away from an empty queue")
            self.outcomes[id] = Outcome.FAILED
            self.note("overload", id)
            return
        cancel = self.streams["cancel"].expovariate(0.1)
        if self.fault("cancel"):
            self.after(cancel, "cancel", lambda: self.cancel(id))
        self.wake()

    def cancel(self, id: int) -> None:
        had_ended = id in self.outcomes
        require(self.scheduler.cancel(id) != had_ended, "cancel says whether it ended a request")
        self.take_report()
        self.wake()

    # Those who compute

    def wake(self) -> None:
        """A step comes soon."""
        if not self.stepping:
            self.stepping = True
            self.after(self.streams["time"].random() * 0.1, "step", self.step)

    def step(self) -> None:
        work = self.scheduler.step(self.now)
        self.take_report()
        self.order(work)
        for load in work.loads:
            self.begin(load)
        parts = {each.id for part in (work.snapshots, work.restores, work.chunks, work.rows) for each in part}
        chunks = [(chunk.id, chunk.start, len(chunk.tokens), chunk.table) for chunk in work.chunks]
        self.note("work", work._replace(chunks=(), loads=()), chunks, [load[:5] for load in work.loads])
        for name, part in zip(work._fields, work):
            self.happened[name] += len(part)
        self.happened["preempted"] += sum(not self.scheduler.live[each.id].outcome for each in work.snapshots)
        everything = self.fault("step")
        failing = frozenset(id for id in sorted(parts) if self.fault("row") or everything)
        early = self.device.execute(work, failing) if self.streams["time"].random() < 0.3 else None
        delay = self.streams["time"].random() if parts else 0.0
        self.after(delay, "done", lambda: self.done(work, failing, early))

    def done(self, work: Work, failing: frozenset[int], early: Results | None) -> None:
        results = early or self.device.execute(work, failing)
        self.scheduler.done(work, results, self.now)
        self.stepping = False
        self.take_report()
        waits = [live.request.deadline for live in self.scheduler.live.values() if live.request.deadline]
        if not work.empty:
            self.wake()
        elif waits and min(waits) > self.now:
            self.after(min(waits) - self.now, "tick", self.wake)

    def begin(self, load: Load) -> None:
        """A load writes some pages at once and the others when it is over."""
        fails = self.fault("load")
        count = self.streams["time"].randint(0, len(load.pages))
        self.device.load(load, count, whole=False)
        self.after(self.streams["time"].expovariate(0.3), "loaded", lambda: self.end(load, fails))

    def end(self, load: Load, fails: bool) -> None:
        count = self.streams["time"].randint(0, len(load.pages)) if fails else len(load.pages)
        self.device.load(load, count, whole=not fails)
        lost = []
        if fails:
            lost = [(load.tier, None)] if load.tier is not Tier.DEVICE else []
            lost = [(source.tier, source.name) for source in load.pages[count : count + 1]] or lost
            lost = lost or [(source.tier, source.name) for source in load.pages[-1:]]
            self.happened["load failed"] += 1
        self.scheduler.loaded(load.id, load.attempt, lost, self.now)
        self.take_report()
        self.wake()

    def take_report(self) -> None:
        report = self.scheduler.report()
        for id, token in report.tokens:
            request = self.asked[id]
            self.answers[id].append(token)
            expected = cold(request.namespace, tuple(request.tokens.tolist()), request.max_new_tokens)
            count = len(self.answers[id])
            require(expected[:count] == tuple(self.answers[id]), "tokens are those of an undisturbed run")
            require(id not in self.outcomes, "nothing comes after the end")
        for id, outcome in report.ended:
            require(id not in self.outcomes, "a request ends once")
            self.outcomes[id] = outcome
            self.note(str(outcome), id)
            request = self.asked[id]
            if outcome is Outcome.FINISHED:
                expected = cold(request.namespace, tuple(request.tokens.tolist()), request.max_new_tokens)
                require(len(self.answers[id]) == len(expected), "a request that finishes has all its tokens")
                self.histories.append((request.namespace, (*request.tokens.tolist(), *self.answers[id])))
        for key in report.published:
            self.happened["published"] += 1
            if self.streams["copies"].random() < 0.6:
                self.after(self.streams["copies"].random(), "copy", lambda key=key: self.copy(key))

    def copy(self, key: bytes) -> None:
        """A checkpoint is written through to the host, if it is there still."""
        store, device = self.holder.store, self.holder.store.shelves[Tier.DEVICE]
        if key not in device.states or key in store.shelves[Tier.HOST].states:
            return
        pages = {
            name: HostBytes(PAGE_NBYTES, tuple(self.device.pages[numbers(device.pages[name])[0]]))
            for name in store.prompts.lacks(key, Tier.HOST)
        }
        state = HostBytes(self.setup.sizes.state_pages * PAGE_NBYTES, self.device.content(device.states[key]))
        del store, device
        self.holder.update(lambda store: store.copied(key, Tier.HOST, state, pages, self.now))

    # The laws

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
        if scheduler.in_flight is None or self.count % 8 == 0:
            self.contents(store)

    def order(self, work: Work) -> None:
        """A step keeps to the budget, the grid, the deadlines, and the order of requests."""
        sizes, live = self.setup.sizes, self.scheduler.live
        spent = len(work.rows) + sum(len(chunk.tokens) for chunk in work.chunks)
        require(spent <= sizes.budget, "a step computes no more tokens than its budget")
        for chunk in work.chunks:
            stop = chunk.start + len(chunk.tokens)
            at_end = stop == len(live[chunk.id].tokens)
            require(
                at_end == chunk.samples and (at_end or stop % sizes.grid == 0), "prefills are cut on the grid"
            )
            require(len(chunk.snapshots) <= sizes.snapshots, "a chunk makes no more checkpoints than it may")
        begun = {each.id for part in (work.restores, work.loads) for each in part}
        waiting = [each.rank for each in live.values() if each.stage is Stage.WAITING]
        require(
            all(live[id].rank < rank for id in begun for rank in waiting),
            "who is first in the queue starts first",
        )
        late = (each.request.deadline for each in live.values() if not each.outcome)
        require(
            all(deadline is None or deadline > self.now for deadline in late),
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
                    got = page.content if isinstance(page, HostBytes) else self.device.pages[numbers(page)[0]]
                    expected = all_rows[number * rows : (number + 1) * rows]
                    require(
                        isinstance(got, list | tuple) and tuple(got) == expected, "a page is that of its name"
                    )

    def prompt(self, store: Store, key: bytes) -> tuple[bytes, bytes, list[bytes]]:
        """What a key stands for: namespace, tokens, and the names of the pages before it."""
        if key not in self.prompts:
            place, index = store.prompts.places[key], store.prompts.index(key)
            path = [node for _, node in index.ancestors(place.node)][::-1]
            tokens = b"".join(node.edge.astype("<i4").tobytes() for node in path)
            self.prompts[key] = place.namespace, tokens, [name for node in path for name in node.names]
        return self.prompts[key]

    def rest(self) -> None:
        """All is as it was when everything has ended."""
        require(self.outcomes.keys() == self.asked.keys() and not self.scheduler.live, "every request ends")
        require(not self.holder.store.pinned, "nothing stays pinned")
        self.holder.update(lambda store: store.evict(Tier.DEVICE, 10**9, self.now))
        require(self.pages.free == self.pages.capacity, "all pages come back")
        require(self.scheduler.holdings.slots.free == self.setup.num_slots - 1, "all slots come back")


def minimised(seed: int) -> str:
    """What a failing seed needs to fail: the law, the set-up, and the faults that cannot be left out."""

    def failing(spared: frozenset[str]) -> tuple[str, list[str]] | None:
        world = World(seed, spared)
        try:
            world.run()
        except Exception as error:
            return f"{type(error).__name__}: {error}", world.faults
        return None

    spared: frozenset[str] = frozenset()
    failure = failing(spared)
    if failure is None:
        return f"seed {seed} holds all laws"
    for name in failure[1]:
        if failing(spared | {name}):
            spared |= {name}
    what, faults = failing(spared) or failure
    return f"seed {seed}: {what}\n{Setup.draw(seed)}\nfaults that it takes: {faults}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count, seed, began, happened = 0, options.seed, time.monotonic(), Counter()
    while count < options.events:
        try:
            world = World(seed).run()
        except Exception:
            raise SystemExit(minimised(seed)) from None
        if seed % 100 == 0 and World(seed).run().trace.digest() != world.trace.digest():
            raise SystemExit(f"seed {seed} had another trace the second time")
        count, seed, happened = count + world.count, seed + 1, happened + world.happened
    print(f"{count} events, {seed - options.seed} seeds, {time.monotonic() - began:.0f} s: {dict(happened)}")


if __name__ == "__main__":
    main()
