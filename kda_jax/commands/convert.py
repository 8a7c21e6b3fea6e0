"""`convert`: Hugging Face's layout to Orbax's and back."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kda_jax.commands.errors import CommandError

# what a checkpoint carries beside its weights and config, and any of our commands read
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
)


class Layout(StrEnum):
    """How a checkpoint lies on disk."""

    hf = "hf"
    orbax = "orbax"


class Dtype(StrEnum):
    """What parameters are held in; the few that are always float32 stay so."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Unpack = Annotated[bool, typer.Option("--unpack", help="Write MXFP4 experts out as plain numbers.")]


def convert(
    source: Annotated[Path, typer.Argument(help="The checkpoint to read.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist yet.")],
    to: Annotated[Layout | None, typer.Option(help="Layout to write (default: the other one).")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the parameters (default: as they are stored).")
    ] = None,
    unpack: Unpack = False,
) -> None:
    """Read a checkpoint in either layout, Hugging Face's or Orbax's, and write it in the other."""
    import kda_jax

    if not source.exists():
        raise CommandError(f"no such path: {source}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandError(f"{target} exists already; name a new folder")
    is_hf = any(source.glob("*.safetensors*"))
    to = to or (Layout.orbax if is_hf else Layout.hf)
    if unpack and not is_hf:
        raise CommandError(f"{source} is an Orbax checkpoint; --unpack takes one in Hugging Face's layout")
    held_in = dtype and dtype.value
    if is_hf:
        model = kda_jax.load(source, dtype=held_in, unpack=unpack)
    else:
        model = kda_jax.load_orbax(source, dtype=held_in)
    (kda_jax.save if to is Layout.hf else kda_jax.save_orbax)(model, target)
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    print(f"{source} ({'hf' if is_hf else 'orbax'}) -> {target} ({to.value})")
