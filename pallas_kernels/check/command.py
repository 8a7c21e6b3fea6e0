"""`python -m pallas_kernels check`: compiles every kernel for every target and says what came of it."""

from __future__ import annotations

import json as jsonlib
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pallas_kernels.check.cases import cases
from pallas_kernels.check.cases.case import Case
from pallas_kernels.check.targets import TARGETS, Target
from pallas_kernels.check.toolchain import Compiled, Missing, Toolchain
from pallas_kernels.shapes import SHAPES

MOST_SECONDS = 60.0
MOST_SPILLED = {"sm_90a": 0, "sm_80": 64}  # bytes a thread


def check(
    json: Annotated[Path | None, typer.Option(help="Write a report here.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only this target; may be given again.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Only this shape; may be given again.")] = None,
) -> None:
    """Compiles the kernels for GPUs, which need not be there. Fails when one does not compile, takes longer than a
    minute, or spills registers (on sm_80, up to 64 bytes a thread are let pass), and when a forward pass is more than
    four kernels."""
    targets = _named("target", target, TARGETS)
    todo = [
        (case, goal)
        for shape in _named("shape", shape, SHAPES)
        for case in cases(shape)
        for goal in targets
        if goal.name not in case.lacking
    ]
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            toolchain = Toolchain(Path(folder))
        except Missing as error:
            typer.echo(f"check: {error}", err=True)
            raise typer.Exit(1) from None
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("compiling", total=len(todo))
            records = []
            for case, goal in todo:
                progress.update(task, description=f"{case.kernel} {case.shape} {goal.name}")
                records.append(_record(toolchain, case, goal))
                progress.advance(task)
    _print(records)
    if json is not None:
        json.write_text(jsonlib.dumps({"check": "kernels", "kernels": records}, indent=1) + "\n")
    wrong = [record for record in records if record["wrong"]]
    for record in wrong:
        name = f"{record['kernel']}, {record['dtype']}, {record['shape']}, {record['target']}"
        typer.echo(f"check: {name}: {record['wrong']}", err=True)
    if wrong:
        raise typer.Exit(1)


def _named(what: str, wanted: list[str] | None, all_of: tuple[Any, ...]) -> list[Any]:
    names = [one.name for one in all_of]
    for name in wanted or ():
        if name not in names:
            typer.echo(f"check: no {what} {name}; there are {', '.join(names)}", err=True)
            raise typer.Exit(1)
    return [one for one in all_of if not wanted or one.name in wanted]


def _record(toolchain: Toolchain, case: Case, target: Target) -> dict[str, Any]:
    """One line of the report."""
    cost = case.cost
    record: dict[str, Any] = {
        "kernel": case.kernel,
        "kind": case.kind,
        "shape": case.shape,
        "dtype": case.dtype,
        "target": target.name,
        "compiled": False,
        "registers": None,
        "spill_bytes": None,
        "compile_s": None,
        "kernels": None,
        "flops": cost.flops,
        "bytes": cost.bytes_accessed,
        "roofline_us": 1e6 * max(cost.bytes_accessed / target.bytes_per_s, cost.flops / target.flops_per_s),
        "wrong": None,
    }
    try:
        made, seconds = toolchain.compile(case.function, case.arguments, target)
    except Exception as error:  # whatever a compiler raises is the finding
        return record | {"wrong": f"does not compile: {str(error).strip().splitlines()[0][:200]}"}
    record |= {"compiled": True, "compile_s": seconds, "kernels": len(made)}
    if absent := [part for part in case.parts if part not in made]:
        return record | {"wrong": f"the assembler was not asked for {absent[0]}, only for {sorted(made)}"}
    kernel = Compiled(*(max(column) for column in zip(*(made[part] for part in case.parts), strict=True)))
    record |= kernel._asdict()
    allowed = MOST_SPILLED[target.name]
    if kernel.spill_bytes > allowed:
        record["wrong"] = f"spills {kernel.spill_bytes} bytes a thread, {allowed} are allowed"
    elif len(made) > case.most_kernels:
        record["wrong"] = f"runs {len(made)} kernels, {case.most_kernels} are allowed: {sorted(made)}"
    elif seconds > MOST_SECONDS:
        record["wrong"] = f"took {seconds:.0f} s to compile, {MOST_SECONDS:.0f} are allowed"
    return record


def _print(records: list[dict[str, Any]]) -> None:
    table = Table(title="Kernels, compiled without a device", title_justify="left")
    for heading in ("kernel", "shape", "dtype", "target"):
        table.add_column(heading)
    for heading in ("kernels", "registers", "spilled bytes", "compile s", "GFLOP", "MB", "roofline us"):
        table.add_column(heading, justify="right")
    for record in records:
        seconds = "-" if record["compile_s"] is None else f"{record['compile_s']:.1f}"
        table.add_row(
            *(record[key] for key in ("kernel", "shape", "dtype", "target")),
            *(
                str("-" if record[key] is None else record[key])
                for key in ("kernels", "registers", "spill_bytes")
            ),
            seconds,
            *(f"{record[key] * scale:.3g}" for key, scale in (("flops", 1e-9), ("bytes", 1e-6))),
            f"{record['roofline_us']:.3g}",
        )
    Console(width=None if Console().is_terminal else 160).print(table)
