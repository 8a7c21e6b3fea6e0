"""`info`: parameters, bytes and states of a model, from its config alone."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kda_jax.commands.errors import CommandError

if TYPE_CHECKING:
    from kda_jax.config import ModelConfig

PRESETS = ("kimi_k3", "kimi_linear_48b", "bench_41m", "tiny")


def info(
    model: Annotated[str, typer.Argument(help=f"A folder with config.json, or one of {', '.join(PRESETS)}.")],
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """How large a model is, and its state at 1k, 128k and 1M tokens. Reads shapes, never weights."""
    figures = describe(model, _config(model))
    if json is not None:
        json.write_text(json_format.dumps(figures, indent=1) + "\n")
    _print(figures)


def _config(model: str) -> ModelConfig:
    from kda_jax.config import ModelConfig
    from kda_jax.weights.files import read_config

    if model in PRESETS:
        return getattr(ModelConfig, model)()
    path = Path(model)
    if not path.exists():
        raise CommandError(
            f"no such path: {model}; give a folder with config.json, or one of {', '.join(PRESETS)}"
        )
    return read_config(path.parent if path.name == "config.json" else path)


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
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            made.add_column(column, justify="right" if index else "left")
        return made

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


def short(count: int) -> str:
    """A count in three digits: 2.78 T, 48.1 B, 5.30 M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def binary(nbytes: int) -> str:
    """Bytes in three digits: 418 MiB, 2.53 TiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes} B"
