"""One state of a model in one safetensors file, so that a conversation can go on in another process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from safetensors.numpy import save_file

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.state import KDAState, MLAState, ModelState, empty
from kda_jax.weights.atomic import new_file
from kda_jax.weights.errors import WeightsError
from kda_jax.weights.files import opened_file

FORMAT, VERSION = "kda-jax state", 1
_KEY = "kda-jax"
# what may differ between two configs whose states mean the same
_NO_ARITHMETIC = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "media_placeholder_token_id",
    "model_max_length",
)


def save_state(
    path: str | Path, state: ModelState, model_or_config: Model | ModelConfig | None = None
) -> None:
    """Saves a state. The file appears whole or not at all, and replaces an older one.

    Leaves are named `layers.{i}.recurrent`, `.conv`, `.latent` and `.position`. Latents are cut to the
    longest row; what is dead in shorter rows is written as zeros. So the same state makes the same file,
    whatever the capacity of its buffers was.

    Args:
        path: the file to make.
        state: the state, [B, ...] in every leaf.
        model_or_config: whose state it is; written into the file, so that `load_state` can tell a model with
            other arithmetic but the same shapes.
    """
    arrays = leaves(state)
    about = json.dumps(describe(state, model_or_config))
    with new_file(path) as written:
        save_file(
            arrays, written, metadata={_KEY: about}
        )  # one entry, since the library writes several in any order


def load_state(path: str | Path, model_or_config: Model | ModelConfig | None = None) -> ModelState:
    """Loads a state; its buffers have room for the longest row and no more.

    Args:
        path: the file.
        model_or_config: the model that shall go on from it; None to take the file's word for its layers.

    Raises:
        WeightsError: if the file is missing, cut short, of another format or version, or of another model.
    """
    path = Path(path)
    with opened_file(path) as tensors:
        check_format(json.loads((tensors.metadata() or {}).get(_KEY, "{}")), model_or_config, str(path))
        arrays = {name: tensors.get_tensor(name) for name in tensors.keys()}
    state = state_from_leaves(arrays, str(path))
    if model_or_config is not None:
        check_layout(state, config_of(model_or_config), str(path))
    return state


def describe(state: ModelState, model_or_config: Model | ModelConfig | None) -> dict[str, Any]:
    """What a saved state says about itself: format, version, tokens of each row, and the config's digest."""
    digest = None if model_or_config is None else config_digest(model_or_config)
    position = np.asarray(state.position).tolist()
    return {"format": FORMAT, "version": VERSION, "position": position, "config": digest}


def check_format(about: Mapping[str, Any], model_or_config: Model | ModelConfig | None, where: str) -> None:
    """Checks what `describe` wrote.

    Raises:
        WeightsError: if it is no state, one of another version, or one of a model with another config.
    """
    if about.get("format") != FORMAT:
        raise WeightsError(f"{where} holds no state: its format is {about.get('format')!r}, not {FORMAT!r}")
    if about.get("version") != VERSION:
        raise WeightsError(
            f"{where} has version {about.get('version')} of the format and this reads {VERSION}; use the "
            "version of kda-jax that wrote it"
        )
    digest = about.get("config")
    if digest and model_or_config is not None and digest != config_digest(model_or_config):
        raise WeightsError(f"{where} is a state of another model: its config has the digest {digest[:12]}")


def leaves(state: ModelState) -> dict[str, np.ndarray]:
    """Name -> array of what is alive in a state: latents cut to the longest row (but to no less than 1)."""
    arrays = {}
    for i, layer in enumerate(state.layers):
        for field, value in layer._asdict().items():
            arrays[f"layers.{i}.{field}"] = np.asarray(value)
        if isinstance(layer, MLAState):
            position = np.asarray(layer.position)
            latent = arrays[f"layers.{i}.latent"][:, : max(1, position.max(initial=0))]
            alive = np.arange(latent.shape[1]) < position[:, None]
            arrays[f"layers.{i}.latent"] = np.where(alive[..., None], latent, latent.dtype.type(0))
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def state_from_leaves(arrays: Mapping[str, ArrayLike], where: str) -> ModelState:
    """The state whose `leaves` these are; `where` names their origin in an error.

    Raises:
        WeightsError: if a leaf is missing or surplus.
    """
    count = 1 + max((int(name.split(".")[1]) for name in arrays if name.startswith("layers.")), default=-1)
    layers = []
    names: set[str] = set()
    for i in range(count):
        kind = KDAState if f"layers.{i}.recurrent" in arrays else MLAState
        expected = [f"layers.{i}.{field}" for field in kind._fields]
        names.update(expected)
        if not arrays.keys() >= set(expected):
            break
        layers.append(kind(*(jnp.asarray(arrays[name]) for name in expected)))
    if names != arrays.keys() or not layers:
        missing, surplus = sorted(names - arrays.keys()), sorted(arrays.keys() - names)
        raise WeightsError(f"{where} is no whole state", missing=missing, surplus=surplus)
    return ModelState(tuple(layers))


def check_layout(state: ModelState, config: ModelConfig, where: str) -> None:
    """Compares a state with a config, leaf by leaf.

    Raises:
        WeightsError: if the config's states have other layers or other shapes.
    """
    rows, capacity = state.position.shape[0], max(1, state.capacity or 1)
    wanted = jax.eval_shape(lambda: empty(config, rows, capacity)).layers
    if len(wanted) != len(state.layers):
        raise WeightsError(f"{where} is a state of {len(state.layers)} layers; the model has {len(wanted)}")
    wrong = []
    for i, (have, want) in enumerate(zip(state.layers, wanted)):
        if type(have) is not type(want):
            wrong.append(f"layers.{i}: {type(have).__name__}, expected {type(want).__name__}")
            continue
        for field, value, expected in zip(have._fields, have, want):
            shape, due = list(value.shape), list(expected.shape)
            if field == "latent":
                due[1] = shape[1]
            if shape != due:
                wrong.append(f"layers.{i}.{field}: shape {shape}, expected {due}")
    if wrong:
        raise WeightsError(f"{where} is a state of another model", misshaped=wrong)


def config_of(model_or_config: Model | ModelConfig) -> ModelConfig:
    """The config itself, or the model's."""
    return model_or_config if isinstance(model_or_config, ModelConfig) else model_or_config.config


def config_digest(model_or_config: Model | ModelConfig) -> str:
    """SHA-256, in hex, of the fields of a config that differ from their defaults and enter its arithmetic."""
    config = config_of(model_or_config)
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _NO_ARITHMETIC and getattr(config, field.name) != field.default
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
