"""What `bench cache` shows: a table, and a picture of recomputed tokens over budgets."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.report import Record, number, table


def show(console: Console, result: Record) -> None:
    """One row a policy, state and budget."""
    rows = [
        (
            f"{record['policy']}, {record['state']}",
            f"{record['budget_gb']:g}",
            f"{record['recomputed']:.4f}",
            str(record["hits"]),
            str(record["made"]),
            str(record["evicted"]),
            number(record.get("requests_per_s")),
        )
        for record in result["results"]
    ]
    columns = ("", "GB", "recomputed", "hits", "made", "evicted", "requests/s")
    title = (
        f"{result['trace']}: {result['requests']} requests, {result['prompt_tokens'] / 1e6:.1f} M prompt tokens, "
        f"{100 * result['unseen']:.1f} % of them in no earlier prompt"
    )
    console.print(table(title, columns, rows))


def draw(result: Record, path: Path) -> None:
    """Draws the recomputed part over the budget, a line a policy and state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in dict.fromkeys((record["policy"], record["state"]) for record in result["results"]):
        records = [each for each in result["results"] if (each["policy"], each["state"]) == name]
        points = sorted((each["budget_gb"], each["recomputed"]) for each in records)
        style = {"ours": "-", "foresight": ":"}.get(name[0], "--")
        width = 2.5 if name[0] == "ours" else 1.2
        axes.plot(*zip(*points), style, linewidth=width, marker="o", markersize=3, label=", ".join(name))
    axes.axhline(result["unseen"], color="grey", linewidth=0.8, label="in no earlier prompt")
    axes.set(xscale="log", xlabel="latents and checkpoints, GB", ylabel="prompt tokens recomputed")
    axes.set(title=f"{result['trace']}, {result['requests']} requests", ylim=(0, 1))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
