"""The files of a Hugging Face checkpoint: a config, and safetensors files read in parts."""

from __future__ import annotations

import json
import math
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError, safe_open

from kda_jax.config import ModelConfig
from kda_jax.weights.errors import WeightsError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_NBYTES = 8  # of the header's length, in front of it


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
    """Tensors by name, read in parts. Each is seen as a matrix: its first axis, and all others as columns.

    Attributes:
        shapes: name -> shape.
        dtypes: name -> safetensors' name of the dtype, as "BF16".
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str, rows: slice, columns: slice, into: np.ndarray) -> None:
        """Reads a part of a tensor.

        Args:
            name: the tensor.
            rows, columns: which part; both ends are numbers.
            into: as many values of the tensor's dtype, contiguous, of any shape.
        """
        ...


class Place(NamedTuple):
    """Where a tensor lies: a file, and the number of bytes before it."""

    file: str
    offset: int


class TensorFiles:
    """The tensors of a folder by name. Nothing is mapped, since a mapped page counts as memory in use: bytes are read
    to where they are wanted. Files stay open until the `with` block ends.

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
        self._places: dict[str, Place] = {}
        self._open: dict[str, FileIO] = {}
        directory = Path(directory)
        promised = _weight_map(directory)
        for file in sorted(set(promised.values())):
            path = str(directory / file)
            for name, (dtype, shape, offset) in _header(directory / file).items():
                self.shapes[name], self.dtypes[name] = shape, dtype
                self._places[name] = Place(path, offset)
        if lost := sorted(name for name in promised if name and name not in self.shapes):
            raise WeightsError(f"{directory / INDEX_FILE} names tensors that its files lack", missing=lost)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read(self, name: str, rows: slice, columns: slice, into: np.ndarray) -> None:
        """As `Tensors.read`: whole rows in one piece, parts of rows one by one.

        Raises:
            WeightsError: if the file has become shorter than it was.
        """
        place, width = self._places[name], math.prod(self.shapes[name][1:])
        target, itemsize = into.reshape(-1).view(np.uint8), into.itemsize
        if columns == slice(0, width):
            self._read_bytes(place, rows.start * width * itemsize, target)
            return
        for row, part in zip(range(rows.start, rows.stop), np.split(target, rows.stop - rows.start)):
            self._read_bytes(place, (row * width + columns.start) * itemsize, part)

    def _read_bytes(self, place: Place, start: int, into: np.ndarray) -> None:
        file = self._open.get(place.file)
        if file is None:
            file = self._open[place.file] = open(place.file, "rb", buffering=0)
        file.seek(place.offset + start)
        done = 0
        while done < len(into):
            count = file.readinto(into[done:].data)
            if not count:
                raise WeightsError(f"{place.file} has become shorter while it was read")
            done += count


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> dtype, shape and offset in the file, of a file whose header and length the library has checked."""
    with opened_file(file):
        pass
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(_LENGTH_NBYTES), "little")
        fields = json.loads(stream.read(size))
    fields.pop("__metadata__", None)
    begin = _LENGTH_NBYTES + size
    return {
        name: (field["dtype"], tuple(field["shape"]), begin + field["data_offsets"][0])
        for name, field in fields.items()
    }


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
        if lost := sorted(file for file in set(weight_map.values()) if not (directory / file).exists()):
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
