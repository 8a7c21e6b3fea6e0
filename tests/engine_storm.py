"""Real engines in a storm: conversations branch, are edited, cancelled, given up; programs, loads and stores fail.

`python tests/engine_storm.py --store host disk mooncake --lookup 0 3 --events 10000` prints what happened with each
tier behind the device, without guesses and with them. Each seed has its own conversations and faults; when they meet
is up to the threads.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
from engine_script import AT_ONCE, Ask, Cancel, Event, Lull, Pack, described, script
from engine_site import CONFIG, ROUNDING, conserved, differs, engine, programs

from cache.plan import ResumePlan
from kda_jax.engine import Engine, Outcome, Programs, Stream
from kda_jax.engine.rates import Rates
from kda_jax.engine.stream import Finished, Token
from own_network import enter_own_network
from transfer import DiskObjects, Item, MemoryObjects, Objects, Put, Read
from transfer.mooncake import MooncakeObjects, MooncakeSettings
from transfer.mooncake.local import LocalMooncake

FAULTS = {
    "decode": 0.01,
    "verify": 0.01,
    "prefill": 0.01,
    "snapshot": 0.02,
    "restore": 0.02,
    "write_pages": 0.05,
    "lost": 0.002,
}
FORGOTTEN = 0.02
"""Of reads and writes of a store that fails."""
HOST_NBYTES, MIB = 2**19, 2**20


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


class Forgetful:
    """A store that loses a read or does not write now and then; otherwise the one that it is given."""

    def __init__(self, objects: Objects, chance: random.Random, rate: float) -> None:
        self.objects, self.chance, self.rate = objects, chance, rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objects, name)

    def get(self, reads: Sequence[Read], timeout: float) -> list[Any]:
        found = self.objects.get(reads, timeout)
        return [None if self.chance.random() < self.rate else each for each in found]

    def put(self, items: Sequence[Item], timeout: float) -> list[Put]:
        if self.chance.random() < self.rate:
            return [Put.FAILED] * len(items)
        return self.objects.put(items, timeout)


class Lived(NamedTuple):
    """What a storm was.

    Attributes:
        happened: by name.
        furthest: the largest difference of a logarithm of probability from that of a prompt alone.
    """

    happened: Counter[str]
    furthest: float


@contextmanager
def tiers(name: str) -> Iterator[list[dict[str, Any]]]:
    """What is behind the devices of one engine or of two: an engine's options for each, with its tiers' names."""
    with ExitStack() as opened:
        if name == "host":
            yield [{"host_nbytes": HOST_NBYTES}]
        elif name == "disk":
            folder = Path(opened.enter_context(TemporaryDirectory()))
            yield [{"disk": opened.enter_context(DiskObjects(folder / "objects", 64 * MIB, sync=False))}]
        elif name == "mooncake":
            local = opened.enter_context(LocalMooncake(segment_bytes=256 * MIB, lease_ms=500))
            objects = opened.enter_context(MooncakeObjects(MooncakeSettings(master=local.address)))
            yield [{"remote": objects}] * 2
        else:
            objects = opened.enter_context(MemoryObjects(4 * MIB))
            yield [{"remote": objects, "host_nbytes": HOST_NBYTES}]


def storm(
    events: int, seed: int, *, faults: bool, check: bool = True, store: str = "memory", **options: Any
) -> Counter[str]:
    """Lives through so many events, and checks every token and, at the end, every page. What happened, by name."""
    with tiers(store) as behind:
        return live(script(events, seed), behind, seed, faults=faults, check=check, **options).happened


def live(
    events: Sequence[Event],
    behind: Sequence[dict[str, Any]],
    seed: int,
    *,
    faults: bool = False,
    check: bool = True,
    exact: bool = False,
    pages: int | None = None,
    **options: Any,
) -> Lived:
    """Plays a script, and checks what comes of it: each token, each logarithm of probability, each page at the end.

    Args:
        events: the script.
        behind: of each engine what `tiers` gives for it.
        seed: of the faults.
        faults: whether programs and stores fail.
        check: whether tokens are compared.
        exact: whether the first token of a request has the bits that it has alone.
        pages: of each pool that may be used, so that the device soon forgets; None for all.
        options: of all engines.
    """
    chance = random.Random(f"faults {seed}")
    given = options.pop("programs", None)  # whose own are all compiled
    made = Faulty(random.Random(f"programs {seed}"), FAULTS) if faults else given or programs()
    engines: list[Engine] = []
    with ExitStack() as opened:
        for tier in behind:
            if faults:
                slower = {"disk", "remote"} & tier.keys()
                tier = tier | {name: Forgetful(tier[name], chance, FORGOTTEN) for name in slower}
            engines.append(
                opened.enter_context(engine(**{"rates": Eager(), "programs": made} | tier | options))
            )
        with ExitStack() as crowded:
            if pages is not None:
                for each in engines:
                    crowded.enter_context(_crowded(each, pages))
            lived = _play(events, engines, check, exact)
            for each in engines:
                assert each.drain(60.0), "nobody runs"
                written(each)
    for each in engines:
        conserved(each)
    return lived


def written(made: Engine) -> None:
    """Waits until nothing is on its way to a slower tier."""
    until = time.monotonic() + 60
    while made._owner.ask(lambda: made._slower.writing.busy):
        assert time.monotonic() < until, "still being written"
        time.sleep(0.005)


@contextmanager
def _crowded(made: Engine, pages: int) -> Iterator[None]:
    """Somebody else has all pages of the pool but so many."""
    pool = made._loop.scheduler.pool.pages
    taken = made._owner.ask(lambda: pool.take(pool.capacity - pages))
    assert taken, "nothing is taken yet"
    yield
    made._owner.ask(lambda: pool.give_back(taken))


class Running(NamedTuple):
    """A request that has not been waited for, and which engine has it."""

    ask: Ask
    stream: Stream
    where: int


def _play(events: Sequence[Event], engines: Sequence[Engine], check: bool, exact: bool) -> Lived:
    happened, furthest = Counter[str](), 0.0
    running: list[Running] = []
    asked: list[list[Ask]] = [[] for _ in engines]
    for event in events:
        if isinstance(event, Pack):
            for ask in event.asks:
                where = int(ask.where * len(engines))
                running.append(Running(ask, _submit(engines[where], ask), where))
                asked[where].append(ask)
            live = sum(not one.stream._ended.is_set() for one in running)
            happened["at once"] = max(happened["at once"], live)
        elif isinstance(event, Cancel):
            time.sleep(event.pause)
            running[event.which].stream.cancel()
        elif isinstance(event, Lull):
            for each in engines:
                written(each)
        else:
            one = running.pop(event.which)
            _count(happened, one.ask, one.stream.result(120.0))
            happened["from another engine"] += _is_anothers(one.ask, one.stream, asked[one.where])
            if check:
                furthest = max(furthest, _check(happened, one.ask, one.stream, exact))
    for each in engines:
        numbers = each.statistics()
        happened["memory lost"] += numbers.memory_lost
        happened["evicted"] += numbers.evicted
        happened["loads lost"] += numbers.lost
        happened.update({f"written {tier}": count for tier, count in numbers.written.items()})
        happened.update({f"unwritten {tier}": count for tier, count in numbers.unwritten.items()})
    return Lived(happened, furthest)


def _submit(made: Engine, ask: Ask) -> Stream:
    return made.submit(
        ask.prompt,
        max_new_tokens=ask.count,
        timeout=ask.timeout,
        priority=ask.priority,
        logprobs=CONFIG.vocab_size if ask.logprobs else 0,
    )


def _is_anothers(ask: Ask, stream: Stream, asked: Sequence[Ask]) -> bool:
    """Whether a request resumed from a text that its own engine was not asked for."""
    cached = stream.result().usage.cached
    restored = ask.prompt[: sum(cached.values())]
    texts = ((*other.prompt, *other.alone.tokens) for other in asked if other is not ask)
    return "remote" in cached and not any(text[: len(restored)] == restored for text in texts)


def _count(happened: Counter[str], ask: Ask, finished: Finished) -> None:
    usage, outcome = finished.usage, finished.outcome
    restored = sum(usage.cached.values())
    happened[outcome.value] += 1
    happened["cancelled amid its tokens"] += outcome is Outcome.CANCELLED and bool(finished.tokens)
    happened["drafts"] += usage.drafted
    happened["drafts that were right"] += usage.accepted
    happened["restored"] += restored
    happened["resumed amid a page"] += restored % 64 > 0
    happened["branches resumed"] += ask.kind == "branch" and restored > 0
    for tier, tokens in usage.cached.items():
        happened[f"from {tier}"] += 1
        happened[f"tokens from {tier}"] += tokens
    assert (finished.error is None) == (outcome is not Outcome.FAILED), finished
    if outcome is Outcome.FAILED:
        assert "by chance" in str(finished.error) or "lost" in str(finished.error), finished
    assert outcome is not Outcome.FINISHED or len(finished.tokens) == ask.count


def _check(happened: Counter[str], ask: Ask, stream: Stream, exact: bool) -> float:
    """Compares tokens with those of the prompt alone, and how likely they were. The largest difference of that."""
    told, alone, furthest = list(stream), ask.alone, 0.0
    tokens = [token.token for token in told]
    assert tuple(tokens) == stream.result().tokens, stream.result()
    happened["tokens"] += len(tokens)
    happened["within rounding"] += differs(tokens, alone)
    for at, (token, mine) in enumerate(zip(told, alone.tokens)):
        if ask.logprobs:
            got, want = _told(token), _logprobs(alone.logits[at])
            furthest = max(furthest, float(np.abs(got - want).max()))
            assert furthest <= ROUNDING, f"token {at} of {ask}: {furthest}"
            happened["logits"] += 1
            if exact and at == 0:
                np.testing.assert_array_equal(got, want)
                happened["to the bit"] += 1
                happened["to the bit, resumed"] += bool(stream.result().usage.cached)
        if token.token != mine:
            break  # what follows is another text
    return furthest


def _told(token: Token) -> np.ndarray:
    """Logarithms of probability as they were told, float64 [vocab]."""
    logprobs = np.full(CONFIG.vocab_size, np.nan)
    for number, logprob in token.top:
        logprobs[number] = logprob
    assert token.logprob == logprobs[token.token], token
    return logprobs


def _logprobs(logits: np.ndarray) -> np.ndarray:
    """Of float32 logits [vocab], as the engine computes them: the same logits give the same bits."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--store", nargs="+", choices=["memory", "host", "disk", "mooncake"], default=["memory"]
    )
    parser.add_argument(
        "--lookup", nargs="+", type=int, default=[3], help="most guesses behind a token, up to 3"
    )
    parser.add_argument("--events", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pages", type=int, help="of each pool that may be used, so that the device soon forgets"
    )
    parser.add_argument("--no-faults", action="store_true")
    asked = parser.parse_args()
    enter_own_network()
    jax.config.update("jax_compilation_cache_dir", ".cache/jax")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    compiled = len(programs()._compiled)
    events = script(asked.events, asked.seed)
    print(f"{compiled} programs; at most {AT_ONCE} at once of {dict(described(events))}")
    for store in asked.store:
        for lookup in asked.lookup:
            start, began = time.process_time(), time.monotonic()
            with tiers(store) as behind:
                options: dict[str, Any] = {
                    "faults": not asked.no_faults,
                    "lookup": lookup,
                    "pages": asked.pages,
                }
                lived = live(events, behind, asked.seed, **options)
            assert len(programs()._compiled) == compiled
            took = f"{time.monotonic() - began:.0f} s, of a core {time.process_time() - start:.0f}"
            print(f"\n{store}, {lookup} guesses: {took}; logarithms within {lived.furthest:.1e}")
            for name, count in sorted(lived.happened.items()):
                print(f"{count:8} {name}", flush=True)


if __name__ == "__main__":
    main()
