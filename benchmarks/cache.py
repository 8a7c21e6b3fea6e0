"""`bench cache`: how many prompt tokens are recomputed under a budget, by policy, when a trace is replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cache_report, machine, report
from benchmarks.agent_trace import agent_requests, lines
from benchmarks.foresight import foresee, unseen
from benchmarks.replay import Sizes, replay
from benchmarks.trace import BLOCK, Request, parse, read
from cache.retention import policy as named

TRACES = Path(__file__).resolve().parent / "traces"
OURS, FORESIGHT = "ours", "foresight"
PEERS = (
    "interval:4096",
    "interval:10240",
    "prompt_end",
    "prompt_end+branch",
    "second_use",
    "path_cap:4",
    "lru",
)
BUDGETS_GB = (64.0, 256.0, 1000.0)

# Kimi K3: 69 KDA layers of 96 heads of 128 x 128, whose convolutions see 3 tokens back; 24 MLA layers of 576 latents
_KDA_LAYERS, _HEADS, _WIDTH, _TAPS, _MLA_LAYERS, _LATENT = 69, 96, 128, 3, 24, 576
_CONVOLUTIONS = _KDA_LAYERS * 3 * _HEADS * _WIDTH * _TAPS * 2
CHECKPOINT_NBYTES = {
    "fp32": _KDA_LAYERS * _HEADS * _WIDTH * _WIDTH * 4 + _CONVOLUTIONS,
    "int8": _KDA_LAYERS * _HEADS * _WIDTH * (_WIDTH + 4) + _CONVOLUTIONS,
}
"""Bytes of one checkpoint: recurrent state in float32, or int8 with a float32 scale a head and key channel; convolution
windows in bfloat16 either way."""
ROW_NBYTES = _MLA_LAYERS * _LATENT * 2
NOTES = {
    "recomputed": "prompt tokens computed over all prompt tokens; requests one after the other, blocks of 512 tokens",
    "unseen": "the part that no earlier prompt of the trace shares: what an endless cache recomputes",
    "foresight": "makes and keeps what is used soonest, knowing every request: can be reached, but not by a cache",
    "requests_per_s": "replayed through index, plan, store and policy in one Python thread, tokens given",
    "made": "checkpoints that were put, those among them that found no place for long",
}


def load(trace: str) -> tuple[str, list[Request]]:
    """A trace's name and requests.

    Args:
        trace: `agent` (written on the spot, seed 3), a trace beside this file (`conversation`, `synthetic`), or a path.

    Raises:
        ValueError: if there is no such trace.
    """
    path = Path(trace)
    if path.is_file():
        return path.name.split(".")[0], read(path)
    if trace == "agent":
        return trace, list(parse(lines(agent_requests()), Path("agent")))
    ours = TRACES / f"{trace}_trace.jsonl.gz"
    if not ours.is_file():
        names = sorted(each.name.removesuffix("_trace.jsonl.gz") for each in TRACES.glob("*_trace.jsonl.gz"))
        raise ValueError(f"no trace {trace!r}: name a file, agent, or one of {', '.join(names)}")
    return trace, read(ours)


def sizes(state: str, checkpoint_bytes: int | None) -> Sizes:
    """Kimi K3's sizes.

    Args:
        state: `fp32` or `int8`: how checkpoints are held.
        checkpoint_bytes: of one in float32, if not K3's; int8 takes as large a part of it as of K3's.

    Raises:
        ValueError: for another state, and for sizes that are not positive.
    """
    if state not in CHECKPOINT_NBYTES:
        raise ValueError(f"no {state=}: a checkpoint is held in {' or '.join(CHECKPOINT_NBYTES)}")
    if checkpoint_bytes is None:
        return Sizes(CHECKPOINT_NBYTES[state], ROW_NBYTES)
    if checkpoint_bytes < 1:
        raise ValueError(f"{checkpoint_bytes=} must be positive")
    part = checkpoint_bytes * CHECKPOINT_NBYTES[state] // CHECKPOINT_NBYTES["fp32"]
    return Sizes(max(1, part), ROW_NBYTES)


def measure(
    requests: Sequence[Request],
    policies: Iterable[str],
    states: Iterable[str],
    budgets_gb: Sequence[float],
    checkpoint_bytes: int | None,
    log: Any,
) -> list[dict[str, Any]]:
    """One record a policy, state and budget."""
    records = []
    for state in states:
        bytes_each = sizes(state, checkpoint_bytes)
        for name in policies:
            for budget in budgets_gb:
                log(f"{name}, {state}, {budget:g} GB")
                if name == FORESIGHT:
                    got = foresee(requests, bytes_each, budget)
                else:
                    got = replay(requests, named(name), bytes_each, budget)
                what = {"policy": name, "state": state, "budget_gb": budget}
                records.append(what | {"checkpoint_bytes": bytes_each.checkpoint} | got)
    return records


def main(
    json: Path | None = None,
    *,
    trace: str = "conversation",
    budget_gb: Sequence[float] = BUDGETS_GB,
    state: Sequence[str] = ("fp32",),
    policy: Sequence[str] = (OURS, FORESIGHT),
    checkpoint_bytes: int | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Replay a trace, print a table, write the report and draw it.

    Args:
        json: where to write the report; None writes none.
        trace: a name or path, see `load`.
        budget_gb: budgets for latents and checkpoints together, in 10^9 bytes.
        state: `fp32`, `int8` or both.
        policy: names of `cache.retention.policy`, `foresight`, or `all`.
        checkpoint_bytes: see `sizes`.
        plot: where to draw recomputed tokens over budgets; by default beside `json`, as a PNG.

    Returns:
        The report, as written: `results` [{policy, state, budget_gb, recomputed, hits, made, evicted, requests_per_s,
        ...}], and what was replayed.

    Raises:
        ValueError: no such trace, policy or state; a budget that is not positive.
    """
    budgets = tuple(map(float, budget_gb))
    if not budgets or min(budgets) <= 0:
        raise ValueError(f"{budget_gb=} must be positive numbers of gigabytes")
    names = (OURS, *PEERS, FORESIGHT) if "all" in policy else tuple(policy)
    for name in names:
        if name != FORESIGHT:
            named(name)
    for each in state:
        sizes(each, checkpoint_bytes)
    console, plot = report.console(), plot or (json and json.with_suffix(".png"))
    report.make_folders(json, plot)
    name, requests = load(trace)
    with report.progress(console) as log:
        records = measure(requests, names, state, budgets, checkpoint_bytes, log)
    result = {
        "benchmark": "cache",
        "machine": machine.describe(),
        "trace": name,
        "requests": len(requests),
        "prompt_tokens": sum(request.num_tokens for request in requests),
        "grid": BLOCK,
        "row_bytes": ROW_NBYTES,
        "unseen": unseen(requests),
        "notes": NOTES,
        "results": records,
    }
    cache_report.show(console, result)
    report.write(json, result)
    if plot is not None:
        cache_report.draw(result, plot)
    return result
