"""The files of a Hugging Face checkpoint: a config, and safetensors files read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError, safe_open

from kda_jax.config import ModelConfig
from kda_jax.weights.errors import WeightsError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a json object.

    Raises:
        WeightsError: if the file is missing or holds no json object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is no readable json file: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must hold a json object, got {type(value).__name__}")
    return value


def read_config(directory: str | Path) -> ModelConfig:
    """Reads the config of a checkpoint.

    Args:
        directory: a folder with `config.json`.

    Raises:
        WeightsError: if the folder or the file is missing, or the config is of another model.
    """
    directory = Path(directory)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise WeightsError(f"{directory} {what}; give the folder that holds {CONFIG_FILE} and {SINGLE_FILE}")
    fields = read_json(directory / CONFIG_FILE)
    try:
        return ModelConfig.from_hf(fields)
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{directory / CONFIG_FILE}: {error}") from None


@runtime_checkable
class Tensors(Protocol):
    """Tensors by name, read one by one.

    Attributes:
        shapes: name -> shape.
        dtypes: name -> safetensors' name of the dtype, as "BF16".
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields tensors in any order; each is read when it is asked for."""
        ...


class TensorFiles:
    """The tensors of a folder by name. No file stays open or mapped: a mapped page counts as memory in use.

    Attributes:
        shapes: name -> shape.
        dtypes: name -> safetensors' name of the dtype, as "BF16".

    Raises:
        WeightsError: if there is no safetensors file, an index names a file or tensor that is not there, or a
            file is cut short.
    """

    def __init__(self, directory: str | Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        directory = Path(directory)
        promised = _weight_map(directory)
        for file in sorted(set(promised.values())):
            with opened_file(directory / file) as tensors:
                for name in tensors.keys():
                    tensor = tensors.get_slice(name)
                    self.shapes[name] = tuple(tensor.get_shape())
                    self.dtypes[name] = tensor.get_dtype()
                    self._file_of[name] = directory / file
        if lost := sorted(name for name in promised if name and name not in self.shapes):
            raise WeightsError(f"{directory / INDEX_FILE} names tensors that its files lack", missing=lost)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields tensors, those of one file together; each is read when it is asked for."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        for file, wanted in by_file.items():
            with opened_file(file) as tensors:
                for name in wanted:
                    yield name, tensors.get_tensor(name)


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor -> file, from the index; one nameless tensor for the file of a checkpoint that has no index."""
    if (directory / INDEX_FILE).exists():
        weight_map = read_json(directory / INDEX_FILE).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or {type(x) for x in weight_map.values()} != {str}
        ):
            raise WeightsError(f"{directory / INDEX_FILE} has no weight_map from tensors to files")
        if lost := sorted({file for file in weight_map.values() if not (directory / file).exists()}):
            raise WeightsError(f"{directory / INDEX_FILE} names files that are not there: {', '.join(lost)}")
        return weight_map
    if (directory / SINGLE_FILE).exists():
        return {"": SINGLE_FILE}
    others = sorted(path.name for path in directory.glob("*.bin")) or sorted(
        path.name for path in directory.glob("*.safetensors")
    )
    hint = f"; it has {', '.join(others[:3])}, which is not read" if others else ""
    raise WeightsError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def opened_file(file: Path) -> Any:
    """A safetensors file, opened to read numpy arrays from it.

    Raises:
        WeightsError: if it is missing, cut short, or no such file.
    """
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        if not file.exists():
            raise WeightsError(f"{file} does not exist") from None
        size = file.stat().st_size
        raise WeightsError(f"{file} ({size} bytes) is no whole safetensors file: {error}") from None
