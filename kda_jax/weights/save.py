"""Model -> Hugging Face checkpoint, under the names of the released models, readable by transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.weights.atomic import new_folder
from kda_jax.weights.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from kda_jax.weights.names import PREFIX_OF_MULTIMODAL, Tensor, is_multimodal, tensors, tied_head
from kda_jax.weights.skeleton import parameters
from kda_jax.weights.transforms import TRANSFORMS

_METADATA = {"format": "pt"}  # transformers refuses files that do not say whose layout they have
_PARAMETERS_KEPT = 4


def save(model: Model, path: str | Path, *, max_shard_nbytes: int = 5_000_000_000) -> None:
    """Saves a model in Hugging Face's layout: `config.json` and one safetensors file, or shards and an index.

    Parameters keep their dtypes. The folder appears whole or not at all. The peak of host memory is the model
    plus one shard.

    Args:
        model: the model.
        path: the folder to make; it must not exist, or be empty.
        max_shard_nbytes: size from which the tensors are spread over several files; one tensor may exceed it.

    Raises:
        ValueError: if the folder holds something already, or `max_shard_nbytes` is not positive.
    """
    if max_shard_nbytes < 1:
        raise ValueError(f"{max_shard_nbytes=} must be positive")
    params = parameters(model)
    shards = _shards(model.config, params, max_shard_nbytes)
    fetch = functools.lru_cache(_PARAMETERS_KEPT)(lambda param: np.asarray(params[param]))
    prefix = PREFIX_OF_MULTIMODAL if is_multimodal(model.config) else ""
    with new_folder(path) as folder:
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            arrays = {prefix + tensor.name: _tensor(tensor, model.config, fetch) for tensor in shard}
            save_file(arrays, folder / file, metadata=_METADATA)
            weight_map |= dict.fromkeys(arrays, file)
        if len(shards) > 1:
            total = sum(_nbytes(tensor, params) for shard in shards for tensor in shard)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        fields = {**model.config.to_hf(), "dtype": params["embed"].dtype.name}
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def _shards(config: ModelConfig, params: dict[str, jax.Array], limit: int) -> list[list[Tensor]]:
    def in_order() -> Iterator[list[Tensor]]:
        shard: list[Tensor] = []
        used = 0
        head = tied_head(config)
        for tensor in (*tensors(config), *(() if head is None else (head,))):
            nbytes = _nbytes(tensor, params)
            if shard and used + nbytes > limit:
                yield shard
                shard, used = [], 0
            shard.append(tensor)
            used += nbytes
        yield shard

    return list(in_order())


def _nbytes(tensor: Tensor, params: dict[str, jax.Array]) -> int:
    return int(np.prod(tensor.shape)) * params[tensor.targets[0].path].dtype.itemsize


def _tensor(tensor: Tensor, config: ModelConfig, fetch: Callable[[str], np.ndarray]) -> np.ndarray:
    arrays = tuple(target.of(fetch(target.path)) for target in tensor.targets)
    values = TRANSFORMS[tensor.transform].from_ours(arrays, tensor.shape, config)
    return np.ascontiguousarray(values)
