"""`python -m benchmarks.device`: on a machine with an NVIDIA GPU, is every kernel right, and how fast is it?

Nothing is downloaded. A first part runs every kernel beside its definition in float64; a second one times them beside
fla's Triton kernels, and gives the times as shares of what the device copies and multiplies, measured in the same run.
With --rehearse the kernels' bodies run step by step on any machine, at little sizes: that the script runs through, and
no figure to quote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.contestant import Absent, quiet
from benchmarks.on_device import races, yardsticks
from benchmarks.on_device.checks import checks
from benchmarks.on_device.fla_triton import Fla, unpack
from benchmarks.on_device.judge import judge_all

ROUNDS = 15


def main(
    json: Annotated[Path | None, typer.Option(help="Write a report here.", dir_okay=False)] = None,
    fla: Annotated[
        Path | None, typer.Option(help="A wheel of fla-core, where it is not installed.", exists=True)
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Kernels step by step, without a GPU, at little sizes.")
    ] = False,
) -> None:
    """Checks every kernel on this machine's GPU against float64, then times it. Fails when a kernel is wrong."""
    if not rehearse and jax.default_backend() != "gpu":
        typer.echo(
            f"device: JAX sees no GPU here, only {jax.devices()[0].device_kind}; install JAX for CUDA, or --rehearse",
            err=True,
        )
        raise typer.Exit(1)
    implementation = "triton-interpret" if rehearse else "triton"
    console = report.console()
    report.make_folders(json)
    result: dict[str, Any] = {"benchmark": "device", "machine": machine.describe(), "rehearsal": rehearse}
    with report.progress(console) as log:
        result["checks"] = judge_all(checks(little=rehearse), implementation, log)
        peer, result["absent"] = _peer(fla)
        if not rehearse:
            log("the device's own rates")
            result["machine"] |= yardsticks.measure()
        rates = None if rehearse else result["machine"]
        result["results"] = []
        for size in races.LITTLE if rehearse else races.FULL:
            with quiet():
                for race in races.races(size, implementation, peer):
                    log(f"{race.act}, {size.tokens} tokens or {size.rows} rows")
                    result["results"] += races.run(race, rounds=2 if rehearse else ROUNDS, rates=rates)
    _print(console, result)
    report.write(json, result)
    wrong = [record for record in result["checks"] if record["wrong"]]
    for record in wrong:
        typer.echo(f"device: {record['name']}, {record['dtype']}: {record['wrong']}", err=True)
    if wrong:
        raise typer.Exit(1)


def _peer(wheel: Path | None) -> tuple[Fla | None, dict[str, str]]:
    try:
        if wheel is not None:
            unpack(wheel)
        return Fla(), {}
    except Absent as error:
        return None, {"fla": str(error)}


def _print(console: Console, result: dict[str, Any]) -> None:
    machine = result["machine"]
    line = f"{machine['device']}, JAX {machine['versions']['jax']}"
    if "copy_bytes_per_s" in machine:
        line += (
            f": copies {machine['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
            f"bfloat16 products {machine['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s"
        )
    console.print(line, highlight=False)
    rows = (
        (
            record["name"],
            record["dtype"],
            report.number(record["error"], 2),
            report.number(record["bound"], 1),
            "no" if record["wrong"] else "yes",
        )
        for record in result["checks"]
    )
    console.print(report.table("Against float64", ("", "dtype", "error", "bound", "right"), rows))
    rows = (
        (
            f"{record['act']}, {record['rows' if 'step' in record['act'] else 'tokens']}",
            record["impl"],
            f"{report.number(record.get('ms'))} / {report.number(record.get('median_ms'))}",
            report.number(record.get("speedup_of_ours", {}).get("median")),
            report.share(record.get("copy_share")),
            report.share(record.get("matmul_share")),
            record["wrong"] or "",
        )
        for record in result["results"]
    )
    columns = ("", "", "ms, min / median", "ours x", "of copying", "of products", "")
    console.print(report.table("Times, 32 heads of 128 channels, bfloat16", columns, rows))
    report.print_absent(console, result)


if __name__ == "__main__":
    typer.run(main)
