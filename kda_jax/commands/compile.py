"""`compile`: a model's programs, compiled for a mesh of devices that are not there."""

from __future__ import annotations

import json as json_format
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from kda_jax.commands.devices import MeshShape, mesh_shape
from kda_jax.commands.errors import CommandError
from kda_jax.commands.presets import ModelName, config_of
from kda_jax.commands.tables import binary, table

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from rich.table import Table

    from kda_jax.commands.programs import Calls, Program
    from kda_jax.config import ModelConfig
    from pallas_kernels.check.targets import Target
    from pallas_kernels.check.toolchain import Toolchain

    Goal: TypeAlias = tuple[Target, str | None]
    """A target, and the topology that was asked for."""


def compile_programs(
    model: ModelName,
    mesh: Annotated[str, typer.Option(help="8x4 is 8 devices for the heads, times 4; experts go over all.")],
    target: Annotated[
        list[str],
        typer.Option(help="sm_90a, sm_80, v5e, v6e, or v6e:4x16 by its topology; may be given again."),
    ],
    one_of_each: Annotated[
        bool, typer.Option("--one-of-each", help="Compile one layer of each kind, and let it stand for all.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of one prefill call.")] = 1024,
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a decode step.")] = 64,
    context: Annotated[int, typer.Option(min=1, help="Tokens that each sequence has room for.")] = 8192,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Compile prefill and a decode step for GPUs or TPUs that need not be there: bytes on each device."""
    from kda_jax.commands.programs import Calls

    shape, goals = mesh_shape(mesh), [_target(name) for name in target]
    config = config_of(model)
    if tokens > context:
        raise CommandError(f"{tokens} tokens do not fit into a context of {context}; give --context {tokens}")
    calls = Calls(tokens, rows, context)
    records = list(_records(config, goals, shape, one_of_each, calls))
    figures = {"model": model, "layers": config.num_layers, **calls._asdict(), "programs": records}
    if json is not None:
        json.write_text(json_format.dumps(figures, indent=1) + "\n")
    _print(figures)
    if wrong := next((record["wrong"] for record in records if record["wrong"]), None):
        raise CommandError(wrong)


def _target(name: str) -> Goal:
    """A target by its name, and the topology that stands behind it."""
    from pallas_kernels.check.targets import TARGETS

    kind, _, topology = name.partition(":")
    for known in TARGETS:
        if known.name == kind:
            return known, topology or None
    raise CommandError(f"no target {name!r} is known; give one of {', '.join(each.name for each in TARGETS)}")


def _records(
    config: ModelConfig, goals: list[Goal], shape: MeshShape, cut: bool, calls: Calls
) -> Iterator[dict[str, Any]]:
    from kda_jax.commands.programs import one_of_each, programs
    from kda_jax.sharding import EXPERT, TENSOR
    from pallas_kernels.check.command import TOOLCHAINS
    from pallas_kernels.check.toolchain import Missing

    with tempfile.TemporaryDirectory() as folder:
        try:
            toolchains = {
                platform: TOOLCHAINS[platform](Path(folder))
                for platform in {goal.platform for goal, _ in goals}
            }
        except Missing as error:
            raise CommandError(str(error)) from None
        for goal, topology in goals:
            toolchain = toolchains[goal.platform]
            mesh = toolchain.mesh(goal, (shape.tensor, shape.expert), (TENSOR, EXPERT), topology)
            about = {"target": goal.name, "device": goal.device, "topology": topology, "mesh": str(shape)}
            of_all = programs(config, mesh, calls)
            some = one_of_each(config) if cut else config
            about |= {"layers": some.num_layers, "memory_bytes": goal.memory_bytes}
            for whole, program in zip(of_all, programs(some, mesh, calls) if cut else of_all, strict=True):
                yield about | _figures(toolchain, mesh, program, whole)


def _figures(toolchain: Toolchain, mesh: Mesh, program: Program, whole: Program) -> dict[str, Any]:
    """What the compiler says of a program, and what all layers of the model hold by their shapes."""
    from rich.console import Console

    from kda_jax.commands.programs import STATE
    from pallas_kernels.backends import PREFERENCE

    with Console(stderr=True).status(f"compiling {program.name} for {mesh.devices.size} devices"):
        try:
            made = toolchain.compile_on(mesh, program.function, program.arguments, give_up=(STATE,))
        except Exception as error:  # whatever a compiler raises is the finding
            reason = " ".join(str(error).split())[:300]
            return {"program": program.name, "wrong": f"{program.name} does not compile: {reason}"}
    more = made.output_bytes - made.reused_bytes + made.temporary_bytes + made.code_bytes
    rest = whole.parameter_bytes + whole.state_bytes + whole.residual_bytes - program.residual_bytes
    return {
        "program": program.name,
        "operators": PREFERENCE[0],
        "parameter_bytes": program.parameter_bytes,
        "state_bytes": program.state_bytes,
        "argument_bytes": made.argument_bytes,
        "new_output_bytes": made.output_bytes - made.reused_bytes,
        "temporary_bytes": made.temporary_bytes,
        "code_bytes": made.code_bytes,
        "total_bytes": made.argument_bytes + more,
        "all_layers": {
            "parameter_bytes": whole.parameter_bytes,
            "state_bytes": whole.state_bytes,
            "total_bytes": (made.argument_bytes if whole is program else rest) + more,
        },
        "compile_s": made.seconds,
        "wrong": None,
    }


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 110)
    shown: dict[str, Table] = {}
    for record in figures["programs"]:
        if record["wrong"]:
            continue
        title = (
            f"{figures['model']} on a mesh {record['mesh']} of {record['device']}: bytes on each, "
            f"which has {binary(record['memory_bytes'])}"
        )
        if title not in shown:
            shown[title] = table(
                *(title, "program", "layers", "parameters", "state", "results", "temporary", "in all"),
                "compile s",
            )
        held = record | {"seconds": f"{record['compile_s']:.0f}"}
        _add(shown[title], record["layers"], held)
        if record["layers"] < figures["layers"]:
            _add(shown[title], figures["layers"], held | record["all_layers"] | {"seconds": "-"})
    console.print(*shown.values())
    console.print(
        f"prefill: {figures['tokens']:,} tokens of one sequence; decode: a token of each of {figures['rows']}; room "
        f"for {figures['context']:,} each. Operators in plain JAX (xla), experts packed, the state's memory reused.",
        highlight=False,
        soft_wrap=True,
    )
    if any(record["layers"] < figures["layers"] for record in figures["programs"]):
        console.print(
            "Rows without seconds: parameters and state of all layers by their shapes, the rest as of one layer of "
            "each kind; in all has the residual blocks between, too.",
            highlight=False,
            soft_wrap=True,
        )


def _add(to: Table, layers: int, held: dict[str, Any]) -> None:
    sizes = ("parameter", "state", "new_output", "temporary", "total")
    to.add_row(
        held["program"], str(layers), *(binary(held[f"{size}_bytes"]) for size in sizes), held["seconds"]
    )
