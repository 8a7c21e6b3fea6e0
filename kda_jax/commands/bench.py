"""`bench ops` and `bench model`: the benchmarks beside the package in a checkout."""

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
