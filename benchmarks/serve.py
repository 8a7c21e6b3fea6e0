"""`bench serve`: a trace against one server and two, without a cache, with one each, and with one they share."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine, report
from benchmarks.cache import load as load_trace
from benchmarks.serving.client import Answer, ask, drive
from benchmarks.serving.load import Asked, scaled, text_tokens
from benchmarks.serving.servers import servers
from kda_jax.tokenizer import load_tokenizer
from transfer.mooncake.local import LocalMooncake

MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny"
ROOM = 1 << 30  # bytes of the store that servers share
OFF, LOCAL, SHARED = "off", "local", "shared"
NOTES = {
    "load": "requests of the trace in its order, token counts divided; each sharing the text that the trace says",
    "recomputed": "prompt tokens computed over all prompt tokens",
    "first": "milliseconds from asking to the first token, over HTTP",
    "later": "milliseconds a token behind the first",
    "tokens_per_s": "prompt and generated tokens of all requests over the seconds all took",
    "shared": "through a Mooncake store of this machine, over TCP; who is asked is drawn for each request",
}


class Case(NamedTuple):
    """Servers, and what their cache is."""

    instances: int
    cache: str

    @property
    def options(self) -> tuple[str, ...]:
        """Of `kda_jax serve`, beside the store."""
        return ("--no-cache",) if self.cache == OFF else ()


CASES = (Case(1, OFF), Case(1, LOCAL), Case(2, OFF), Case(2, LOCAL), Case(2, SHARED))


def main(
    json: Path | None,
    *,
    model: Path | None = None,
    trace: str = "agent",
    requests: int = 120,
    divide: int = 32,
    at_once: int = 4,
    plot: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Runs all cases, one after the other.

    Args:
        json: where the figures go, with a picture beside them.
        model: served; the example's when None.
        trace: as of `bench cache`.
        requests: from the trace's beginning.
        divide: how many times fewer tokens.
        at_once: requests at a time.
        plot: where the picture goes, if not beside the figures.
        quick: few requests, and no two servers.

    Returns:
        The report, as written: `results` [{instances, cache, recomputed, first_p50_ms, ...}], and what was asked.

    Raises:
        ValueError: for a trace that is none, and sizes that are not positive.
        RuntimeError: a server does not start, or refuses a request.
    """
    if min(requests, at_once) < 1:
        raise ValueError(f"{requests=} and {at_once=} must be positive")
    console, model = report.console(), model or MODEL
    plot = plot or (json and json.with_suffix(".png"))
    report.make_folders(json, plot)
    name, rows = load_trace(trace)
    load = scaled(rows[: 8 if quick else requests], text_tokens(load_tokenizer(model)), divide)
    records = []
    with tempfile.TemporaryDirectory() as folder, report.progress(console) as log:
        for case in CASES[:2] if quick else CASES:
            records.append(measure(case, model, load, at_once, Path(folder), log))
    result = {
        "machine": machine.describe(),
        "notes": NOTES,
        "trace": name,
        "requests": len(load),
        "divide": divide,
        "at_once": at_once,
        "results": records,
    }
    show(console, result)
    report.write(json, result)
    if plot is not None:
        draw(result, plot)
    return result


def measure(
    case: Case, model: Path, load: Sequence[Asked], at_once: int, folder: Path, log: Callable[[str], None]
) -> dict[str, Any]:
    """One record: the load against the servers of a case."""
    longest = max(len(asked.tokens) + asked.max_tokens for asked in load) + 64
    sizes = {
        "--dtype": "float32",
        "--slots": at_once,
        "--max-tokens": longest,
        "--compiled": folder / "programs",
    }
    options = [*case.options, *(str(word) for option in sizes.items() for word in option)]
    title = f"{case.instances} x cache {case.cache}"
    with ExitStack() as stack:
        log(f"{title}: starting")
        if case.cache == SHARED:
            mooncake = stack.enter_context(LocalMooncake(segment_bytes=ROOM))
            options += ["--store", f"mooncake:{mooncake.address}"]
        addresses = stack.enter_context(servers(model, case.instances, options, folder))
        for address in addresses:  # what a server does for the first time is not measured
            ask(address, model.name, Asked([1] * 70, 4, 0.0))
        answers, seconds = drive(
            addresses, model.name, load, at_once, lambda done: log(f"{title}: {done} of {len(load)}")
        )
    return {"instances": case.instances, "cache": case.cache, **figures(answers, seconds)}


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """What the answers come to."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    restored = sum((Counter(answer.cached) for answer in answers), Counter())
    completion = sum(answer.completion_tokens for answer in answers)
    first = np.array([answer.first_s for answer in answers]) * 1e3
    later = np.array([answer.later_s for answer in answers if answer.completion_tokens > 1]) * 1e3
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "restored": dict(restored),
        "recomputed": 1 - restored.total() / prompt,
        **{f"first_p{p}_ms": float(np.percentile(first, p)) for p in (50, 99)},
        **{f"later_p{p}_ms": float(np.percentile(later, p)) if len(later) else None for p in (50, 99)},
        "tokens_per_s": (prompt + completion) / seconds,
        "seconds": seconds,
    }


def show(console: Any, result: report.Record) -> None:
    """One row a case."""
    rows = [
        (
            f"{record['instances']} x cache {record['cache']}",
            f"{record['recomputed']:.3f}",
            *(report.number(record[f"first_p{p}_ms"]) for p in (50, 99)),
            *(report.number(record[f"later_p{p}_ms"]) for p in (50, 99)),
            report.number(record["tokens_per_s"]),
        )
        for record in result["results"]
    ]
    columns = ("", "recomputed", "first ms p50", "p99", "later ms p50", "p99", "tokens/s")
    total = result["results"][0]["prompt_tokens"]
    title = f"{result['trace']}, divided by {result['divide']}: {result['requests']} requests, {total} prompt tokens"
    console.print(report.table(title, columns, rows))


def draw(result: report.Record, path: Path) -> None:
    """Draws recomputed tokens and times to the first token, a bar a case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    records = result["results"]
    names = [f"{record['instances']} x {record['cache']}" for record in records]
    left.bar(names, [record["recomputed"] for record in records])
    left.set(ylabel="prompt tokens recomputed", ylim=(0, 1))
    for p in (99, 50):
        right.bar(names, [record[f"first_p{p}_ms"] for record in records], label=f"p{p}")
    right.set(ylabel="ms to the first token")
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=20)
    figure.suptitle(f"{result['trace']}, {result['requests']} requests, servers x cache")
    figure.savefig(path, dpi=150)
