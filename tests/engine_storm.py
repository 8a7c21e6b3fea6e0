"""A real engine in a storm: conversations come, are edited, cancelled, given up; programs, loads and stores fail.

`python tests/engine_storm.py --events 10000` prints what happened. Each seed has its own conversations and faults; when
they meet is up to the threads.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from engine_site import CONFIG, Cold, cold, conserved, differs, engine, programs

from cache.plan import ResumePlan
from kda_jax.engine import Outcome, Programs, Stream
from kda_jax.engine.rates import Rates
from transfer import MemoryObjects, Read

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 192, 256, 300)
MOST_NEW = 12
FAULTS = {
    "decode": 0.01,
    "prefill": 0.01,
    "snapshot": 0.02,
    "restore": 0.02,
    "write_pages": 0.05,
    "lost": 0.002,
}


class Eager(Rates):
    """Deeper is quicker: loads whatever is held, and always searches. A small model computes quicker than it loads."""

    def seconds(self, plan: ResumePlan, num_tokens: int) -> float:
        return float(-plan.boundary)

    def compute(self, tokens: int) -> float:
        return 100.0

    def worth_searching(self, tokens: int) -> bool:
        return tokens > 0


class Faulty(Programs):
    """Programs that fail by chance: before they touch the memory, or after they have used it up."""

    def __init__(self, chance: random.Random, rates: dict[str, float]) -> None:
        self.__dict__.update(programs().__dict__)
        self.chance, self.rates = chance, rates

    def _run(self, name: tuple[str, int, int], *args: Any) -> Any:
        if self.chance.random() < self.rates.get(name[0], 0.0):
            raise RuntimeError(f"{name[0]} failed by chance")
        if name[0] != "read_pages" and self.chance.random() < self.rates.get("lost", 0.0):
            for leaf in jax.tree.leaves(args[0]):
                leaf.delete()
            raise RuntimeError(f"{name[0]} failed with the memory")
        return super()._run(name, *args)


class Forgetful(MemoryObjects):
    """A store that loses a read now and then."""

    def __init__(self, chance: random.Random, rate: float) -> None:
        super().__init__(2**22)
        self.chance, self.rate = chance, rate

    def get(self, reads: Sequence[Read], timeout: float) -> list[Any]:
        found = super().get(reads, timeout)
        return [None if self.chance.random() < self.rate else each for each in found]


def next_prompt(choose: random.Random, histories: list[list[int]]) -> list[int]:
    """A new conversation, or a turn, an edit or a repeat of one before."""
    begun: list[int] = []
    if histories and choose.random() < 0.75:
        parent = choose.choice(histories[-30:])
        cuts = [len(parent), len(parent), choose.randint(1, len(parent)), len(parent) // 64 * 64]
        begun = parent[: choose.choice(cuts)]
    length = choose.choice([*LENGTHS, choose.randint(1, 300)])
    more = max(1, length - len(begun)) if choose.random() < 0.5 else choose.randint(1, 20)
    return [*begun, *choose.choices(range(CONFIG.vocab_size), k=more)][:300]


@lru_cache(maxsize=4096)
def alone(prompt: tuple[int, ...]) -> Cold:
    return cold(prompt, MOST_NEW)


def storm(events: int, seed: int, *, faults: bool, check: bool = True, **options: Any) -> Counter[str]:
    """Lives through so many events, and checks every token and, at the end, every page. What happened, by name."""
    choose, happened = random.Random(seed), Counter[str]()
    made = Faulty(random.Random(f"programs {seed}"), FAULTS if faults else {})
    histories: list[list[int]] = []
    running: list[tuple[list[int], Stream]] = []

    def end(at: int) -> None:
        prompt, stream = running.pop(at)
        finished = stream.result(120.0)
        happened[finished.outcome.value] += 1
        happened["drafts"] += finished.usage.drafted
        happened["drafts that were right"] += finished.usage.accepted
        happened["restored"] += sum(finished.usage.cached.values())
        for tier in finished.usage.cached:
            happened[f"from {tier}"] += 1
        assert (finished.error is None) == (finished.outcome is not Outcome.FAILED), finished
        assert (
            finished.outcome is not Outcome.FAILED
            or "by chance" in str(finished.error)
            or "lost" in str(finished.error)
        )
        if check:
            happened["within rounding"] += differs(finished.tokens, alone(tuple(prompt)))
        histories.append([*prompt, *finished.tokens])

    with Forgetful(random.Random(f"store {seed}"), 0.02 if faults else 0.0) as remote:
        used = {"remote": remote, "host_nbytes": 2**19, "rates": Eager(), "programs": made, **options}
        with engine(**used) as serving:
            for _ in range(events):
                what = choose.random()
                if what < 0.5 and len(running) < 16:
                    prompt = next_prompt(choose, histories)
                    stream = serving.submit(
                        prompt,
                        max_new_tokens=choose.randint(1, MOST_NEW),
                        timeout=choose.random() if choose.random() < 0.05 else None,
                        priority=choose.randint(0, 2),
                    )
                    running.append((prompt, stream))
                elif what < 0.6 and running:
                    choose.choice(running)[1].cancel()
                elif running:
                    end(choose.randrange(len(running)))
            while running:
                end(0)
            numbers = serving.statistics()
        happened["memory lost"] = numbers.memory_lost
        happened["evicted"] = numbers.evicted
        happened["loads lost"] = numbers.lost
        happened.update({f"written {tier}": count for tier, count in numbers.written.items()})
        happened.update({f"unwritten {tier}": count for tier, count in numbers.unwritten.items()})
    conserved(serving)
    return happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--lookup", type=int, default=3)
    asked = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", ".cache/jax")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    happened = storm(asked.events, asked.seed, faults=not asked.no_faults, lookup=asked.lookup)
    for name, count in sorted(happened.items()):
        print(f"{count:8} {name}")


if __name__ == "__main__":
    main()
