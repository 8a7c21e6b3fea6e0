"""A scheduler's life with faults, by seed: one heap of events, the laws after every one, and calm at the end.

`python tests/engine_simulation.py --events 1000000` runs seeds until so many events have passed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import heapq
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_device import VOCAB, Violation, require
from engine_drafter import Guesses
from engine_instance import Instance
from engine_remote import Remote
from engine_setup import NAMESPACES, Setup

from kda_jax.engine.request import Outcome, Overloaded, Request


class World:
    """Instances, the remote store between them, and those who use them."""

    def __init__(self, seed: int, spared: frozenset[str] = frozenset()) -> None:
        """`spared` names faults that do not happen this time."""
        self.seed, self.spared, self.setup = seed, spared, Setup.draw(seed)
        setup = self.setup
        self.streams = {
            name: random.Random(f"{name} {seed}")
            for name in ("time", "tie", "work", "copies", "remote", "drafts", *setup.rates)
        }
        self.heap: list[tuple[float, float, int, str, Callable[[], None]]] = []
        self.now, self.count, self.calm = 0.0, 0, False
        self.asked: dict[int, Request] = {}
        self.answers: dict[int, list[int]] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.prompts: dict[bytes, tuple[bytes, bytes, list[bytes]]] = {}
        self.histories: list[tuple[bytes, tuple[int, ...]]] = []
        self.happened: Counter[str] = Counter()
        self.faults: list[str] = []
        self.drawn: Counter[str] = Counter()
        self.touched: Instance | None = None
        self.trace = hashlib.blake2b(digest_size=16)
        self.remote = Remote(self, setup.remote)
        self.instances = [Instance(self) for _ in range(setup.instances)]
        self.places: dict[int, Instance] = {}

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
            self.touched = None
            event()
            turn = self.instances[self.count % len(self.instances)]
            turn.laws()
            if self.touched and self.touched is not turn:
                self.touched.laws()
            if what == "arrival" and self.happened["arrival"] == self.setup.requests:
                self.calm, self.bound = True, self.count + 10_000
            require(not self.calm or self.count < self.bound, "every request ends when faults have stopped")
        require(self.outcomes.keys() == self.asked.keys(), "every request ends")
        for instance in self.instances:
            instance.rest()
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
        self.submit(id, namespace, prompt, work.randint(1, self.setup.most_new))
        if self.fault("kill"):
            self.kill(work.randrange(len(self.instances)))

    def submit(self, id: int, namespace: bytes, prompt: tuple[int, ...], most: int) -> None:
        """A request comes to one of the instances, which asks the remote store first."""
        work, tokens = self.streams["work"], np.array(prompt, np.int32)
        instance, patience = work.choice(self.instances), work.expovariate(0.05)
        request = Request(
            id=id,
            namespace=namespace,
            tokens=tokens,
            max_new_tokens=most,
            priority=work.choice([0, 0, 0, 1, 2]),
            deadline=self.now + patience if self.fault("deadline") else None,
            remote=self.remote.find(namespace, tokens, self.setup.sizes.rows),
        )
        self.asked[id], self.answers[id], self.places[id] = request, [], instance
        self.histories.append((namespace, prompt))
        try:
            instance.scheduler.submit(request, Guesses(request, self.streams["drafts"]))
        except Overloaded:
            require(instance.scheduler.holdings.queued > 0, "nobody is turned away from an empty queue")
            self.outcomes[id] = Outcome.FAILED
            self.note("overload", id)
            return
        cancel = self.streams["cancel"].expovariate(0.1)
        if self.fault("cancel"):
            instance.after(cancel, "cancel", lambda: instance.cancel(id))
        instance.wake()

    def kill(self, number: int) -> None:
        """An instance is gone with all it had, and another begins in its place; its users ask again."""
        self.note("killed", number)
        old, self.instances[number] = self.instances[number], Instance(self)
        old.killed = True
        for id, live in list(old.scheduler.live.items()):
            if id not in self.outcomes:
                request, again = live.request, len(self.asked) + 1_000_000
                self.outcomes[id] = Outcome.FAILED
                self.submit(again, request.namespace, tuple(request.tokens.tolist()), request.max_new_tokens)


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


def live(first: int, step: int, events: int) -> tuple[int, int, Counter[str]]:
    """Seeds `first`, `first + step` ... until so many events have passed: events, seeds, and what happened.

    Raises:
        Violation: at the first seed that breaks a law, with what it takes to see it again.
    """
    count, seed, happened = 0, first, Counter()
    while count < events:
        try:
            world = World(seed).run()
        except Exception:
            raise Violation(minimised(seed)) from None
        if seed % 100 == 0 and World(seed).run().trace.digest() != world.trace.digest():
            raise Violation(f"seed {seed} had another trace the second time")
        count, seed, happened = count + world.count, seed + step, happened + world.happened
    return count, (seed - first) // step, happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, default=1, help="each takes its part of the seeds and events"
    )
    parser.add_argument("--trace", action="store_true", help="print the digest of one seed's trace")
    options = parser.parse_args()
    if options.trace:
        print(World(options.seed).run().trace.hexdigest())
        return
    began, most = time.monotonic(), options.processes
    parts = [(options.seed + number, most, -(-options.events // most)) for number in range(most)]
    with multiprocessing.get_context("spawn").Pool(most, initializer=gc.freeze) as pool:
        try:
            counts, seeds, happened = zip(*pool.starmap(live, parts))
        except Violation as found:
            raise SystemExit(str(found)) from None
    total = sum(happened, Counter())
    print(f"{sum(counts)} events, {sum(seeds)} seeds, {time.monotonic() - began:.0f} s: {dict(total)}")


if __name__ == "__main__":
    main()
