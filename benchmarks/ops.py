"""`bench ops`: KDA over a sequence and token by token, against whatever else this environment holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benchmarks import boundaries, decode, machine, report
from benchmarks.contest import Log, Outcome, Settings, hold
from benchmarks.contestant import Contestant
from benchmarks.inputs import Case, Gate
from benchmarks.peers import OURS, OURS_WITH_GATE, PEERS

SECTIONS = ("prefill", "short", "boundaries", "decode")
GATES: tuple[Gate, ...] = get_args(Gate)
SHORT = 200
SHORT_BOUNDARIES = (1, 63, 64, 65, 100, 199)
HEADS = {"H": 4, "K": 128, "V": 128}
NOTES = {
    "ms": "minimum; the median and the number of timed calls stand beside it",
    "both": "value_and_grad of sum(out * w) + sum(state * w2) over q, k, v, gate, beta, initial state",
    "speedup": "the peer's time over ours, by minima and by medians: above 1, ours is faster",
    "ours_with_gate": "kda_gate, then kda_prefill, in one program: the match of a peer that fuses the gate",
    "gflops": "one count for all: 6 K V + C (3 K + 2 V) + C^2 / 3 a token and head, C = 16; both: 3 times",
    "matmul_share": "gflops over the machine's own rate of float32 matrix products, measured in this run",
}


def chosen(only: str | Sequence[str] | None) -> tuple[str, ...]:
    """The sections to run.

    Raises:
        ValueError: a name is no section.
    """
    wanted = (only,) if isinstance(only, str) else tuple(only or SECTIONS)
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        raise ValueError(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in wanted)


def merge(result: dict[str, Any], section: str, outcome: Outcome) -> None:
    """Add a section's records, refusals and absences to the result."""
    result.setdefault(section, []).extend(outcome.results)
    result["refused"].extend(outcome.refused)
    result["absent"] |= outcome.absent


def measure(
    sections: tuple[str, ...],
    settings: Settings,
    *,
    heads: dict[str, int],
    peers: tuple[Contestant, ...],
    log: Log,
) -> dict[str, Any]:
    """Run the sections and return their records: `results` (prefill), `short`, `boundaries`, `decode`,
    `refused`, `absent`.

    Args:
        sections: names out of `SECTIONS`.
        settings: lengths, rounds, budgets.
        heads: `H`, `K`, `V`.
        peers: who may take part in `prefill` and `short`.
        log: told who is at work.
    """
    result: dict[str, Any] = {"results": [], "refused": [], "absent": {}}
    lengths = {"prefill": settings.lengths, "short": (SHORT,)}
    for section in ("prefill", "short"):
        for length in lengths[section] if section in sections else ():
            for gate in GATES:
                outcome = hold(
                    Case(gate=gate, T=length, **heads),
                    settings,
                    ours=OURS,
                    ours_with_gate=OURS_WITH_GATE,
                    peers=peers,
                    log=lambda text, gate=gate, length=length: log(f"{gate} T={length}: {text}"),
                )
                merge(result, "results" if section == "prefill" else section, outcome)
    if "boundaries" in sections:
        long = settings.lengths[0]
        for length, counts in (
            (SHORT, SHORT_BOUNDARIES),
            (long, tuple(long * i // 7 + i for i in range(1, 7))),
        ):
            rounds = settings.rounds["forward"] * (10 if length == SHORT and not settings.quick else 1)
            records = [
                boundaries.measure(Case(gate=gate, T=length, **heads), counts, rounds=rounds, log=log)
                for gate in GATES
            ]
            result.setdefault("boundaries", []).extend(records)
    if "decode" in sections:
        rounds = settings.rounds["forward"] * (1 if settings.quick else 10)
        for batch in (1, 4):
            merge(result, "decode", decode.measure(batch, sizes=heads, rounds=rounds, log=log))
    return result


def main(
    json: Path | None = None, only: str | Sequence[str] | None = None, quick: bool = False
) -> dict[str, Any]:
    """Run `bench ops`, print its tables and write the JSON report.

    Args:
        json: where to write the report; None writes none.
        only: one section or several of `SECTIONS`; None runs all.
        quick: short sequences and three rounds: a look at whether everything runs, no figures to quote.

    Returns:
        The report, as written: `results` [{impl, gate, T, forward_ms, both_ms, ...}], `machine`, and a list
        for each section.

    Raises:
        ValueError: `only` names no section.
        RuntimeError: our own results are not finite or differ with and without boundaries.
    """
    sections = chosen(only)
    settings = Settings.quickest() if quick else Settings()
    console = report.console()
    report.make_folders(json)
    size = {"size": 512, "read_mib": 64, "rounds": 3} if quick else {}
    with report.progress(console) as log:
        log("the machine's own rates")
        rates = machine.measure(**size)
        measured = measure(sections, settings, heads=HEADS, peers=PEERS, log=log)
        log("the machine's own rates")
        rates = machine.best(rates, machine.measure(**size))
    for record in (*measured["results"], *measured.get("short", [])):
        for act in ("forward", "both"):
            if f"{act}_gflops" in record:
                record[f"{act}_matmul_share"] = record[f"{act}_gflops"] / rates["matmul_gflops"]
    result = {
        "benchmark": "ops",
        "machine": machine.describe() | rates,
        "settings": asdict(settings) | {"sections": sections},
        "notes": NOTES,
        **measured,
    }
    report.print_ops(console, result)
    report.write(json, result)
    return result
