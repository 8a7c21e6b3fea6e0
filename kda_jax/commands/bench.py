"""`bench`: the benchmarks beside the package in a checkout."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from kda_jax.commands.errors import CommandError

bench = typer.Typer(help="Measure against what else there is, in one run.", no_args_is_help=True)
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.", dir_okay=False)]
Only = Annotated[
    list[str] | None, typer.Option(help="A section: prefill, short, boundaries, decode; may be repeated.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Short inputs, few rounds: does everything run?")]


def _run(name: str, json: Path | None, **options: object) -> None:
    try:
        module = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "benchmarks":
            raise CommandError(
                "the benchmarks are not installed; run this in the folder of a checkout"
            ) from None
        raise
    module.main(json, **options)


@bench.command()
def ops(json: Json = None, only: Only = None, quick: Quick = False) -> None:
    """Time the operators beside a scan and other packages."""
    _run("ops", json, only=only, quick=quick)


@bench.command()
def model(json: Json = None, quick: Quick = False) -> None:
    """Time the 41 M parameter model beside transformers, on the same weights."""
    _run("model", json, quick=quick)


@bench.command()
def cache(
    more: Annotated[list[float] | None, typer.Argument(metavar="[GB]...", help="More budgets.")] = None,
    json: Json = None,
    trace: Annotated[
        str, typer.Option(help="A file in Mooncake's format, or: conversation, synthetic, agent.")
    ] = "conversation",
    budget_gb: Annotated[
        list[float] | None,
        typer.Option(help="Budgets of latents and checkpoints together, one or several (64 256 1000)."),
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="Checkpoints in fp32 or int8; may be repeated.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="ours, a peer's rule, foresight, or all; may be repeated (ours and foresight)."),
    ] = None,
    checkpoint_bytes: Annotated[
        int | None, typer.Option(help="Bytes of a float32 checkpoint (Kimi K3's).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figures here (beside --json).", dir_okay=False)
    ] = None,
) -> None:
    """Replay a trace through the cache: how much of its prompts is recomputed under a budget."""
    given = {"budget_gb": [*(budget_gb or ()), *(more or ())], "state": state, "policy": policy}
    chosen = {name: values for name, values in given.items() if values}
    _run("cache", json, trace=trace, checkpoint_bytes=checkpoint_bytes, plot=plot, **chosen)


@bench.command()
def transfer(json: Json = None, quick: Quick = False) -> None:
    """Move checkpoints through every store, beside plain copies and Mooncake's own calls."""
    _run("transfer", json, quick=quick)


@bench.command(name="import")
def import_(
    gb: Annotated[float, typer.Option(min=0.0, help="Size of the checkpoint, in 10^9 bytes.")] = 2.0,
    shards: Annotated[int, typer.Option(min=1, help="Files that it has.")] = 16,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """Load a random checkpoint in Kimi K3's layout: peak of memory, and time beside a plain read."""
    _run("importing", json, gb=gb, shards=shards, quick=quick)


@bench.command()
def engine(json: Json = None, quick: Quick = False) -> None:
    """Time first and later tokens of the engine, with the cache and without, alone and beside a long prompt."""
    _run("engine", json, quick=quick)


@bench.command()
def serve(
    json: Json = None,
    model: Annotated[Path | None, typer.Option(help="What is served (the example's model).")] = None,
    trace: Annotated[
        str, typer.Option(help="A file in Mooncake's format, or: conversation, synthetic, agent.")
    ] = "agent",
    requests: Annotated[int, typer.Option(min=1, help="From the trace's beginning.")] = 120,
    divide: Annotated[int, typer.Option(min=1, help="So many times fewer tokens; divides 512.")] = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    plot: Annotated[Path | None, typer.Option(help="Draw here (beside --json).", dir_okay=False)] = None,
    quick: Quick = False,
) -> None:
    """Serve a trace with one server and two: no cache, one each, one that they share."""
    sizes = {"requests": requests, "divide": divide, "at_once": at_once}
    _run("serve", json, model=model, trace=trace, plot=plot, quick=quick, **sizes)
