"""The trained model as a small folder that `kda_jax.load` reads: float16 weights, byte tokenizer, licence note."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import kda_jax
from kda_jax import Model
from tiny_lm.batches import BOS, EOS, PAD

LICENCE = """\
The weights in this folder were trained by examples/train_tiny.py on the source files of the Python standard library,
which are Copyright (c) Python Software Foundation and licensed under the PSF License Version 2
(https://docs.python.org/3/license.html). No file of the library is part of this folder. The weights are licensed, as
the rest of this repository, under the Apache License 2.0.
"""

SPECIAL = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}
TOKENIZER = {
    "tokenizer_class": "ByteTokenizer",
    "added_tokens_decoder": {str(i): {"content": text, "special": True} for i, text in SPECIAL.items()},
    "bos_token": SPECIAL[BOS],
    "eos_token": SPECIAL[EOS],
    "pad_token": SPECIAL[PAD],
}


def store_model(model: Model, folder: Path) -> None:
    """Writes the model with its matrices in float16. What the model keeps in float32 by itself stays so.

    Float16 rounds to 11 bits where bfloat16 rounds to 8, and no weight here comes near its range.
    """
    if folder.exists():
        shutil.rmtree(folder)
    state = nnx.state(model)

    def small(path: tuple, leaf: nnx.Variable) -> nnx.Variable:
        wide = any(part in ("router", "A_log", "dt_bias") for part in path)
        return leaf if wide else leaf.replace(leaf[...].astype(jnp.float16))

    kda_jax.save(nnx.merge(nnx.graphdef(model), nnx.map_state(small, state)), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=1) + "\n")
    (folder / "LICENCE").write_text(LICENCE)
