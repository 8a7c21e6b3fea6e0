"""What a benchmark shows: who is at work, then tables of its report, and figures in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

Record = Mapping[str, Any]


def console() -> Console:
    """The terminal; in a file or pipe, 120 columns."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=120)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that says who is at work, cleared at the end; in a file or pipe, each text once."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("")
            yield lambda text: bar.update(task, description=text)
        return
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            console.print(text, highlight=False, markup=False)

    yield say


def make_folders(*paths: Path | None) -> None:
    """Makes the folders of files that will be written, before anything is measured.

    Raises:
        OSError: if that is not possible.
    """
    for path in paths:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)


def write(path: Path | None, result: Record) -> None:
    """Writes a report as JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def number(value: float | None, digits: int = 3) -> str:
    """A figure with `digits` significant digits, or a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def pair(record: Record, key: str) -> str:
    """Minimum and median of one act, in ms."""
    if record.get(f"{key}_ms") is None:
        return "-"
    return f"{number(record[f'{key}_ms'])} / {number(record[f'{key}_median_ms'])}"


def share(value: float | None) -> str:
    """A share of the machine's rate as a percentage."""
    return "-" if value is None else f"{100 * value:.0f} %"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with its first column left, the rest right."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def print_machine(console: Console, machine: Record) -> None:
    """One line: the processor and its own rates."""
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
        f"JAX {machine['versions']['jax']}: float32 products {number(machine['matmul_gflops'])} GFLOP/s, "
        f"reads {number(machine['read_gb_s'])} GB/s",
        highlight=False,
    )


def print_contest(console: Console, title: str, records: Sequence[Record]) -> None:
    """One table a gate and length, ours first, peers with how much faster ours is."""
    for gate, length in dict.fromkeys((record["gate"], record["T"]) for record in records):
        rows = []
        for record in (each for each in records if (each["gate"], each["T"]) == (gate, length)):
            ratios = [record.get(f"{act}_speedup_of_ours", {}).get("min") for act in ("forward", "both")]
            rows.append(
                (
                    record["impl"],
                    pair(record, "forward"),
                    number(ratios[0], 3),
                    share(record.get("forward_matmul_share")),
                    pair(record, "both"),
                    number(ratios[1], 3),
                    share(record.get("both_matmul_share")),
                )
            )
        columns = ("", "forward ms", "ours x", "of matmul", "both ms", "ours x", "of matmul")
        console.print(table(f"{title}: {gate} gate, T={length} (min / median)", columns, rows))


def print_ops(console: Console, result: Record) -> None:
    """Everything that `bench ops` measured."""
    print_machine(console, result["machine"])
    print_contest(console, "KDA", result["results"])
    print_contest(console, "KDA, short prompt", result.get("short", []))
    if rows := result.get("boundaries"):
        columns = ("gate, T, boundaries", "without ms", "with ms", "cost, min", "cost, median")
        cells = (
            (
                f"{row['gate']}, {row['T']}, {len(row['boundaries'])}",
                pair(row, "without"),
                pair(row, "with"),
                f"{row['cost_min']:.2f}",
                f"{row['cost_median']:.2f}",
            )
            for row in rows
        )
        console.print(table("States at boundaries from the same call", columns, cells))
    if rows := result.get("decode"):
        columns = ("", "B", "us a token, min", "median", "ours x")
        cells = (
            (
                row["impl"],
                str(row["B"]),
                number(row["us_per_token"]),
                number(row["us_per_token_median"]),
                number(row.get("speedup_of_ours", {}).get("min")),
            )
            for row in rows
        )
        console.print(table("Decode, 16 tokens a dispatch", columns, cells))
    print_absent(console, result)
    for refusal in result["refused"]:
        case = f"{refusal['gate']} T={refusal['T']} {refusal['pass']}"
        console.print(
            f"did not take part: {refusal['impl']}, {case}: {refusal['reason']}",
            highlight=False,
            markup=False,
        )


def print_absent(console: Console, result: Record) -> None:
    """Who is not installed, a line each."""
    for name, why in result["absent"].items():
        console.print(f"not here: {name}: {why}", highlight=False, markup=False)


def print_model(console: Console, result: Record) -> None:
    """Everything that `bench model` measured."""
    print_machine(console, result["machine"])
    rows = []
    for row in result["results"]:
        kind = "matmul" if row["act"] == "prefill" else "bandwidth"
        rows.append(
            (
                f"{row['act']} {row['tokens']}, batch {row['batch']}",
                row["impl"],
                f"{number(row['tokens_per_s'])} / {number(row['tokens_per_s_median'])}",
                number(row.get("speedup_of_ours", {}).get("median")),
                f"{share(row[f'{kind}_share'])} of {kind}",
            )
        )
    columns = ("", "", "tokens/s, best / median", "ours x, median", "reached")
    console.print(table("The model, float32", columns, rows))
    keys = ("loaded", "above_weights", "again_above_weights", "again_above_before")
    rows = [(row["impl"], *(f"{row[key]:.0f}" for key in keys)) for row in result["memory"]]
    tokens = result["settings"]["memory"]
    columns = ("", "loaded, MiB", "first call's peak above", "second's above", "above what was before it")
    console.print(table(f"Memory of a prefill of {tokens} tokens", columns, rows))
    for row in result["llama_cpp_inferred"]:
        case = f"{row['act']} {row['tokens']}, batch {row['batch']}"
        ratio = number(row["ours_over_llama_cpp"])
        console.print(f"inferred, not run: {case}: {ratio} x llama.cpp float32", highlight=False)
    for name, error in result["logits_errors"].items():
        console.print(f"logits of {name} within {error:.1e} of ours, relative", highlight=False)
    print_absent(console, result)
