"""`bench engine`: what the cache and the order of work give to those who wait for tokens, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, report
from cache import Namespace
from cache.retention import Creation
from kda_jax.engine import Engine, Stream
from kda_jax.engine.programs import Programs
from kda_jax.forward import SplitModel, split
from kda_jax.weights import load

MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny"
ROWS, TURNS, TOKENS, NEW = 8, 20, 8192, 32
VOCAB = 256  # random prompts are of these tokens
LONG = 4096  # tokens of the prompt that comes while others decode
SIZES: dict[str, Any] = dict(slots=ROWS + 1, nbytes=2**28, max_tokens=TOKENS + 256)
NOTES = {
    "model": "examples/tiny in float32",
    "last_turn": "milliseconds to the first token of a conversation's last turn, with the cache and without",
    "decode": "tokens a second of rows that decode side by side, with the cache and without",
    "beside": "milliseconds a token of rows that decode, alone and while a long prompt is read",
}


def main(json: Path | None, *, quick: bool = False) -> dict[str, Any]:
    """Measures all three, both sides of each in turns in this process.

    Args:
        json: where the figures go.
        quick: one round of each, and shorter ones.

    Returns:
        The report, as written: `results`, a mapping of the three.
    """
    console = report.console()
    report.make_folders(json)
    parts, rounds = split(load(MODEL, dtype="float32")), 1 if quick else 5
    with report.progress(console) as log, _engine(parts, log) as on, _engine(parts, log, on.programs) as off:
        tokens = TOKENS // 8 if quick else TOKENS
        results = {
            "last_turn": last_turn(on, off, tokens, 1 if quick else 3, log),
            "decode": decode(on, off, NEW if quick else 4 * NEW, rounds, log),
            "beside": beside(on, LONG // 8 if quick else LONG, rounds, log),
        }
    result = {"machine": machine.describe(), "notes": NOTES, "results": results}
    show(console, results)
    report.write(json, result)
    return result


@contextmanager
def _engine(
    parts: SplitModel, log: Callable[[str], None], programs: Programs | None = None
) -> Iterator[Engine]:
    """One with the cache; with the programs of that, one that keeps no checkpoint."""
    creation = None if programs is None else Creation(kinds=frozenset())
    with Engine(
        parts,
        namespace=Namespace(weights=b"examples/tiny", tokenizer=b"examples/tiny"),
        creation=creation,
        programs=programs,
        progress=lambda name, done, number: log(f"compiling {done + 1} of {number}: {name}"),
        **SIZES,
    ) as engine:
        yield engine


class Watched:
    """When each token of a stream came, seconds of `time.perf_counter`; watched by a thread of its own."""

    def __init__(self, stream: Stream) -> None:
        self.times: list[float] = []
        self.first = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(stream,))
        self._thread.start()

    def all(self) -> list[float]:
        """All times, when the stream has ended."""
        self._thread.join()
        return self.times

    def _watch(self, stream: Stream) -> None:
        for _ in stream:
            self.times.append(time.perf_counter())
            self.first.set()
        self.first.set()


def rows(engine: Engine, rng: np.random.Generator, new: int) -> list[Watched]:
    """`ROWS` requests that decode side by side: each has its first token."""
    prompts = [rng.integers(0, VOCAB, 64).tolist() for _ in range(ROWS)]
    watched = [Watched(engine.submit(prompt, max_new_tokens=new, stop_tokens=())) for prompt in prompts]
    for each in watched:
        each.first.wait()
    return watched


def last_turn(
    on: Engine, off: Engine, tokens: int, rounds: int, log: Callable[[str], None]
) -> dict[str, float]:
    """Time to the first token of a conversation's last turn."""
    rng, new = np.random.default_rng(0), min(NEW, tokens // TURNS // 2)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    history: list[int] = []
    for number in range(rounds):
        history = []
        for turn in range(TURNS):
            log(f"conversation {number + 1} of {rounds}, turn {turn + 1} of {TURNS}")
            history += rng.integers(0, VOCAB, tokens // TURNS - new).tolist()
            times = [
                (name, engine.submit(history, max_new_tokens=new, stop_tokens=()).result())
                for name, engine in (("with", on), ("without", off))
                if name == "with" or turn == TURNS - 1
            ]
            if turn < TURNS - 1:
                history += times[0][1].tokens
        for name, finished in times:
            assert finished.times.first_token_s is not None
            seconds[name].append(finished.times.first_token_s)
    medians = {f"{name}_ms": 1e3 * float(np.median(each)) for name, each in seconds.items()}
    return {"tokens": len(history), **medians, "ratio": medians["without_ms"] / medians["with_ms"]}


def decode(on: Engine, off: Engine, new: int, rounds: int, log: Callable[[str], None]) -> dict[str, float]:
    """Tokens a second of `ROWS` requests side by side, while all of them decode."""
    rng, rates = np.random.default_rng(1), {"with": [], "without": []}
    for number in range(rounds):
        for name, engine in (("with", on), ("without", off)):
            log(f"decode {name} cache, round {number + 1} of {rounds}")
            times = [each.all() for each in rows(engine, rng, new)]
            begin, end = max(each[0] for each in times), min(each[-1] for each in times)
            made = sum(begin < at <= end for each in times for at in each)
            rates[name].append(made / (end - begin))
    medians = {f"{name}_tokens_per_s": float(np.median(each)) for name, each in rates.items()}
    return {**medians, "ratio": medians["with_tokens_per_s"] / medians["without_tokens_per_s"]}


def beside(engine: Engine, long: int, rounds: int, log: Callable[[str], None]) -> dict[str, float]:
    """Time a token of `ROWS` requests, alone and beside a long prompt."""
    rng, gaps = np.random.default_rng(2), {"alone": [], "beside": []}
    for number in range(rounds):
        for name, between in gaps.items():
            log(f"decode {name}, round {number + 1} of {rounds}")
            watched, began, ended = rows(engine, rng, 256), time.perf_counter(), np.inf
            if name == "beside":
                engine.submit(rng.integers(0, VOCAB, long).tolist(), max_new_tokens=1).result()
                ended = time.perf_counter()
            for each in watched:
                between += np.diff([at for at in each.all() if began < at <= ended]).tolist()
    figures = {
        f"{name}_p{p}_ms": 1e3 * float(np.percentile(each, p))
        for name, each in gaps.items()
        for p in (50, 99)
    }
    return {"tokens": long, **figures, "ratio": figures["beside_p99_ms"] / figures["alone_p99_ms"]}


def show(console: Any, results: dict[str, dict[str, float]]) -> None:
    """One row a measurement."""
    turn, speed, side = results["last_turn"], results["decode"], results["beside"]
    made = [
        (
            f"first token of turn {TURNS}, {turn['tokens']} tokens, ms",
            turn["with_ms"],
            turn["without_ms"],
            turn,
        ),
        (f"{ROWS} rows decode, tokens/s", speed["with_tokens_per_s"], speed["without_tokens_per_s"], speed),
    ]
    table = [(name, *(report.number(each) for each in (*pair, end["ratio"]))) for name, *pair, end in made]
    console.print(report.table("The cache", ("", "with", "without", "ratio"), table))
    table = [
        (f"p{p}", *(report.number(side[f"{name}_p{p}_ms"]) for name in ("alone", "beside"))) for p in (50, 99)
    ]
    title = f"ms a token of {ROWS} rows, alone and beside a prompt of {side['tokens']} tokens"
    console.print(report.table(f"{title}: p99 {side['ratio']:.2f} x", ("", "alone", "beside"), table))
