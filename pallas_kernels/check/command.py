"""`python -m pallas_kernels check`: compiles every kernel for every target and says what came of it."""

from __future__ import annotations

import atexit
import json as jsonlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pallas_kernels.check.cases import cases
from pallas_kernels.check.cases.case import Case
from pallas_kernels.check.gpu import GpuToolchain
from pallas_kernels.check.targets import TARGETS, Target
from pallas_kernels.check.toolchain import Missing, Toolchain
from pallas_kernels.check.tpu import TpuToolchain
from pallas_kernels.shapes import SHAPES

MOST_SECONDS = 60.0
MOST_SPILLED = {"sm_90a": 0, "sm_80": 64}  # bytes a thread
TOOLCHAINS: dict[str, Callable[[Path], Toolchain]] = {"gpu": GpuToolchain, "tpu": TpuToolchain}


def check(
    json: Annotated[Path | None, typer.Option(help="Write a report here.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only this target; may be given again.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Only this shape; may be given again.")] = None,
    jobs: Annotated[int, typer.Option(help="Compile so many at a time, each in a process.", min=1)] = 1,
) -> None:
    """Compiles the kernels for GPUs and TPUs, which need not be there. Fails when one does not compile, takes longer
    than a minute, or spills registers (on sm_80, up to 64 bytes a thread are let pass), and when a forward pass is more
    than four kernels."""
    targets = _named("target", target, TARGETS)
    todo = [
        Job(each.name, number, goal.name)
        for each in _named("shape", shape, SHAPES)
        for number, case in enumerate(cases(each))
        for goal in targets
        if goal.platform == case.platform and goal.name not in case.lacking
    ]
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            toolchains = _toolchains(Path(folder), {goal.platform for goal in targets})
        except Missing as error:
            typer.echo(f"check: {error}", err=True)
            raise typer.Exit(1) from None
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("compiling", total=len(todo))
            records = []
            for record in _records(todo, toolchains, jobs):
                progress.update(task, description=f"{record['kernel']} {record['shape']} {record['target']}")
                progress.advance(task)
                records.append(record)
    _print(records)
    if json is not None:
        json.write_text(jsonlib.dumps({"check": "kernels", "kernels": records}, indent=1) + "\n")
    wrong = [record for record in records if record["wrong"]]
    for record in wrong:
        name = f"{record['kernel']}, {record['dtype']}, {record['shape']}, {record['target']}"
        typer.echo(f"check: {name}: {record['wrong']}", err=True)
    if wrong:
        raise typer.Exit(1)


class Job(NamedTuple):
    """One kernel for one target, named so that another process finds it."""

    shape: str
    number: int  # in `cases` of the shape
    target: str


def _records(todo: list[Job], toolchains: dict[str, Toolchain], jobs: int) -> Iterator[dict[str, Any]]:
    """The jobs' lines of the report, in order."""
    if jobs == 1:
        yield from (_run(job, toolchains) for job in todo)
        return
    # A compiler keeps one core busy; a forked one would hang on the threads that it no longer has.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _begin, (set(toolchains),)) as pool:
        yield from pool.map(_run_here, todo)


def _toolchains(folder: Path, platforms: set[str]) -> dict[str, Toolchain]:
    return {platform: make(folder) for platform, make in TOOLCHAINS.items() if platform in platforms}


HERE: dict[str, Toolchain] = {}
"""A process's own toolchains."""


def _begin(platforms: set[str]) -> None:
    folder = tempfile.mkdtemp(prefix="check-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    HERE.update(_toolchains(Path(folder), platforms))


def _run_here(job: Job) -> dict[str, Any]:
    return _run(job, HERE)


def _run(job: Job, toolchains: dict[str, Toolchain]) -> dict[str, Any]:
    (shape,) = (shape for shape in SHAPES if shape.name == job.shape)
    (target,) = (target for target in TARGETS if target.name == job.target)
    case = list(cases(shape))[job.number]
    return _record(toolchains[case.platform], case, target)


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
        "code_bytes": None,
        "temporary_bytes": None,
        "compile_s": None,
        "kernels": None,
        "flops": cost.flops,
        "bytes": cost.bytes_accessed,
        "roofline_us": 1e6 * max(cost.bytes_accessed / target.bytes_per_s, cost.flops / target.flops_per_s),
        "wrong": None,
    }
    try:
        made = toolchain.compile(case.function, case.arguments, target)
    except Exception as error:  # whatever a compiler raises is the finding
        return record | {"wrong": f"does not compile: {str(error).strip().splitlines()[0][:200]}"}
    names = sorted(kernel.name for kernel in made.kernels)
    record |= {
        "compiled": True,
        "compile_s": made.seconds,
        "kernels": len(names),
        "code_bytes": made.code_bytes,
        "temporary_bytes": made.temporary_bytes,
    }
    if absent := [part for part in case.parts if part not in names]:
        return record | {"wrong": f"{absent[0]} is not in the program, only {names}"}
    parts = [kernel for kernel in made.kernels if kernel.name in case.parts]
    registers, spilled = (
        _most(getattr(kernel, what) for kernel in parts) for what in ("registers", "spill_bytes")
    )
    record |= {"registers": registers, "spill_bytes": spilled}
    if spilled is not None and spilled > MOST_SPILLED[target.name]:
        record["wrong"] = f"spills {spilled} bytes a thread, {MOST_SPILLED[target.name]} are allowed"
    elif len(names) > case.most_kernels:
        record["wrong"] = f"runs {len(names)} kernels, {case.most_kernels} are allowed: {names}"
    elif made.seconds > MOST_SECONDS:
        record["wrong"] = f"took {made.seconds:.0f} s to compile, {MOST_SECONDS:.0f} are allowed"
    return record


def _most(counts: Iterable[int | None]) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _print(records: list[dict[str, Any]]) -> None:
    table = Table(title="Kernels, compiled without a device", title_justify="left")
    for heading in ("kernel", "shape", "dtype", "target"):
        table.add_column(heading)
    columns = {
        "kernels": ("kernels", 1, "d"),
        "registers": ("registers", 1, "d"),
        "spilled bytes": ("spill_bytes", 1, "d"),
        "temporary MB": ("temporary_bytes", 1e-6, ".3g"),
        "compile s": ("compile_s", 1, ".1f"),
        "GFLOP": ("flops", 1e-9, ".3g"),
        "MB": ("bytes", 1e-6, ".3g"),
        "roofline us": ("roofline_us", 1, ".3g"),
    }
    for heading in columns:
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(
            *(record[key] for key in ("kernel", "shape", "dtype", "target")),
            *(
                "-" if record[key] is None else format(record[key] * unit, form)
                for key, unit, form in columns.values()
            ),
        )
    Console(width=None if Console().is_terminal else 160).print(table)
