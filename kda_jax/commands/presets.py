"""A model as the commands take it: a preset's name, or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kda_jax.commands.errors import CommandError

if TYPE_CHECKING:
    from kda_jax.config import ModelConfig

PRESETS = ("kimi_k3", "kimi_linear_48b", "bench_41m", "tiny")
ModelName: TypeAlias = Annotated[
    str, typer.Argument(help=f"A folder with config.json, or one of {', '.join(PRESETS)}.")
]


def config_of(model: str) -> ModelConfig:
    """The config of a preset, or of a folder.

    Raises:
        CommandError: there is no such folder.
    """
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
