"""`info`: parameters, bytes and states of a model, from its config alone."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kda_jax.commands.presets import ModelName, config_of
from kda_jax.commands.tables import binary, short, table

if TYPE_CHECKING:
    from kda_jax.config import ModelConfig


def info(
    model: ModelName,
    mesh: Annotated[
        str | None,
        typer.Option(help="Bytes on each device of a mesh: 8x4 is 8 devices for the heads, times 4."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="What fits on h200, v6e, ...: on this mesh, or without one on how many."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """How large a model is, and its state at 1k, 128k and 1M tokens. Reads shapes, never weights."""
    from kda_jax.commands import placement
    from kda_jax.commands.devices import device_named, mesh_shape

    shape = None if mesh is None else mesh_shape(mesh)
    kind = None if device is None else device_named(device)
    config = config_of(model)
    figures = describe(model, config)
    if shape is not None:
        figures["mesh"] = placement.describe(config, shape, kind)
    elif kind is not None:
        figures["counts"] = placement.describe_counts(config, kind)
    if json is not None:
        json.write_text(json_format.dumps(figures, indent=1) + "\n")
    _print(figures)


def describe(name: str, config: ModelConfig) -> dict[str, Any]:
    """The figures as plain json: counts of parameters, and bytes of weights and of one sequence's state."""
    from kda_jax.commands.sizes import CONTEXTS, sizes, state_bytes

    size, state = sizes(config), state_bytes(config)
    return {
        "model": name,
        "layers": {"kda": config.layers.count("kda"), "mla": config.layers.count("mla")},
        "model_max_length": config.model_max_length,
        "parameters": {"total": size.total, "active": size.active, "parts": size.parts},
        "weight_bytes": {
            "float32": 4 * size.total,
            "bfloat16": 2 * size.total,
            "stored": size.stored_nbytes,
            "stored_as": "MXFP4 experts" if config.quantization else "bfloat16, small tensors float32",
        },
        "checkpoint_bytes": {
            "total": state.checkpoint,
            "recurrent_float32": state.recurrent,
            "conv_bfloat16": state.conv,
            "latent_bfloat16_per_token": state.latent_per_token,
        },
        "state_bytes": {
            str(tokens): {
                "state": state.at(tokens),
                "latents": tokens * state.latent_per_token,
                "plain_attention": tokens * state.plain_per_token,
            }
            for tokens in CONTEXTS
        },
    }


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    layers, parameters, weights = figures["layers"], figures["parameters"], figures["weight_bytes"]
    console.print(
        f"[bold]{figures['model']}[/bold]: {layers['kda']} KDA and {layers['mla']} MLA layers, "
        f"at most {figures['model_max_length']:,} tokens",
        highlight=False,
    )
    counts = table("Parameters", "part", "parameters", "share")
    for part, count in parameters["parts"].items():
        counts.add_row(part, f"{count:,}", f"{count / parameters['total']:.1%}")
    counts.add_section()
    counts.add_row("total", f"{parameters['total']:,}", short(parameters["total"]))
    counts.add_row("active for a token", f"{parameters['active']:,}", short(parameters["active"]))
    console.print(counts)

    held = table("Weights", "dtype", "bytes", "")
    for name, count in (
        ("float32", weights["float32"]),
        ("bfloat16", weights["bfloat16"]),
        (f"as released ({weights['stored_as']})", weights["stored"]),
    ):
        held.add_row(name, f"{count:,}", binary(count))
    console.print(held)

    states = table("State of one sequence", "tokens", "state", "of it latents", "plain attention", "ratio")
    for tokens, row in figures["state_bytes"].items():
        states.add_row(
            f"{int(tokens):,}",
            binary(row["state"]),
            binary(row["latents"]),
            binary(row["plain_attention"]),
            f"{row['plain_attention'] / row['state']:.1f}",
        )
    console.print(states)
    checkpoint = figures["checkpoint_bytes"]
    recurrent, conv = binary(checkpoint["recurrent_float32"]), binary(checkpoint["conv_bfloat16"])
    latent = checkpoint["latent_bfloat16_per_token"]
    console.print(
        f"A checkpoint: {checkpoint['total']:,} bytes ({recurrent} of float32 recurrent states, {conv} of "
        f"bfloat16 windows), beside {latent:,} bytes of bfloat16 latents a token.\n"
        "Plain attention keeps keys and values of all heads in every layer, in bfloat16.",
        highlight=False,
        soft_wrap=True,
    )
    _print_placement(figures)


def _print_placement(figures: dict[str, Any]) -> None:
    from rich.console import Console

    from kda_jax.commands import placement

    console = Console()
    if "mesh" in figures:
        console.print(*placement.tables(figures["mesh"]))
    elif "counts" in figures:
        console.print(placement.table_of_counts(figures["counts"]))
    else:
        return
    console.print(placement.EXPLAINED, highlight=False, soft_wrap=True)
