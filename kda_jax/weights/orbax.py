"""Orbax checkpoints: a model with its config, or a state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.state import ModelState
from kda_jax.weights.atomic import new_folder
from kda_jax.weights.errors import WeightsError
from kda_jax.weights.skeleton import assemble, parameters, shapes
from kda_jax.weights.statefile import (
    check_format,
    check_layout,
    config_of,
    describe,
    leaves,
    state_from_leaves,
)


def save_orbax(model: Model, path: str | Path) -> None:
    """Saves a model as an Orbax checkpoint with the items `config` (json) and `params` (arrays).

    Args:
        model: the model.
        path: the folder to make; it must not exist, or be empty.

    Raises:
        ValueError: if the folder holds something already.
    """
    params = parameters(model)
    config = {**model.config.to_hf(), "dtype": params["embed"].dtype.name}
    _save(path, "params", _nested(params), "config", config)


def load_orbax(path: str | Path, dtype: DTypeLike | None = None) -> Model:
    """Loads a model that `save_orbax` saved; the arrays are read into place.

    Args:
        path: the checkpoint's folder.
        dtype: of the parameters; None keeps each as it is stored. Some are float32 always, as in `load`.

    Raises:
        WeightsError: if the folder holds no model of ours, or not all of it.
    """
    fields = _restore_json(path, "config")
    try:
        config = ModelConfig.from_hf(fields)
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{path}: {error}") from None
    held = str(fields.get("dtype", "float32")) if dtype is None else dtype
    wanted = shapes(config, held)
    if dtype is None:
        stored = _stored_shapes(path, "params")
        wanted = {
            param: jax.ShapeDtypeStruct(shape.shape, stored.get(param, shape).dtype)
            for param, shape in wanted.items()
        }
    values = _restore(path, "params", wanted)
    return assemble(config, held, lambda param, _: values.pop(param))


def save_state_orbax(
    state: ModelState, path: str | Path, model_or_config: Model | ModelConfig | None = None
) -> None:
    """Saves a state as an Orbax checkpoint, under the leaf names of `save_state`.

    Args:
        state: the state.
        path: the folder to make; it must not exist, or be empty.
        model_or_config: whose state it is.

    Raises:
        ValueError: if the folder holds something already.
    """
    _save(path, "state", _nested(leaves(state)), "about", describe(state, model_or_config))


def load_state_orbax(path: str | Path, model_or_config: Model | ModelConfig | None = None) -> ModelState:
    """Loads a state that `save_state_orbax` saved; its buffers have room for the longest row and no more.

    Args:
        path: the checkpoint's folder.
        model_or_config: the model that shall go on from it; None to take the file's word for its layers.

    Raises:
        WeightsError: if the folder holds no state, not all of it, or the state of another model.
    """
    about = _restore_json(path, "about")
    check_format(about, model_or_config, str(path))
    state = state_from_leaves(_restore(path, "state", _stored_shapes(path, "state")), str(path))
    if model_or_config is not None:
        check_layout(state, config_of(model_or_config), str(path))
    return state


def _save(path: str | Path, item: str, arrays: Mapping[str, Any], json_item: str, fields: dict) -> None:
    import orbax.checkpoint as ocp

    args = {item: ocp.args.StandardSave(arrays), json_item: ocp.args.JsonSave(fields)}
    with new_folder(path) as folder, _checkpointer() as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(**args), force=True)


def _restore_json(path: str | Path, item: str) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    try:
        with _checkpointer() as checkpointer:
            return checkpointer.restore(path, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[item]
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise WeightsError(f"{path} is no Orbax checkpoint with an item {item!r}: {error}") from None


def _stored_shapes(path: str | Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    path = Path(path).absolute()
    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata[item]
    if metadata is None:
        raise WeightsError(f"{path} has no arrays under {item!r}")
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in _flat(metadata.tree).items()}


def _restore(path: str | Path, item: str, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    stored = _stored_shapes(path, item)
    misshaped = [
        f"{name}: shape {list(stored[name].shape)}, expected {list(wanted[name].shape)}"
        for name in sorted(stored.keys() & wanted.keys())
        if stored[name].shape != wanted[name].shape
    ]
    if stored.keys() != wanted.keys() or misshaped:
        missing, surplus = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        raise WeightsError(
            f"{path} does not fit its config", missing=missing, surplus=surplus, misshaped=misshaped
        )
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = {
        name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here) for name, shape in wanted.items()
    }
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(_nested(placed))})
    with _checkpointer() as checkpointer:
        return _flat(checkpointer.restore(Path(path).absolute(), args=args)[item])


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # where it is needed, as everywhere in this file: it takes seconds

    handlers: dict[str, Any] = {item: ocp.StandardCheckpointHandler() for item in ("params", "state")}
    handlers |= {item: ocp.JsonCheckpointHandler() for item in ("config", "about")}
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _flat(tree: Mapping[str, Any], scope: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{scope}{key}.") if isinstance(value, Mapping) else {scope + key: value}
    return flat
