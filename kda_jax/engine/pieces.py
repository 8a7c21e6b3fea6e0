"""Checkpoints cut by heads, the same under every mesh, so that each device reads what it holds.

What lies with the heads of KDA layers is cut into `Pieces.count` leaves `heads.{n}.{leaf}`; all else is whole. In the
order of their names the leaves of one piece follow each other: what a device reads is one run of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from numpy.typing import NDArray

from kda_jax.config import ModelConfig
from kda_jax.sharding import TENSOR, AnyMesh, automatic

MOST = 32
"""Pieces at most: each adds two leaves a layer to a checkpoint's manifest."""

_HEADS = {"recurrent": 1, "values": 1, "scales": 1, "conv": 2}
"""The axis of a leaf that its heads lie on, by the end of its name."""

Arrays: TypeAlias = Mapping[str, NDArray]
Read: TypeAlias = Callable[[Collection[str]], Arrays]
"""The leaves of these names, with their bytes and no others read; raises OSError if one cannot be read."""


class Pieces(NamedTuple):
    """How one model's checkpoints are written and read on one mesh.

    Attributes:
        config: the model's.
        mesh: with axes "tensor" and "expert", of this process's devices.
        int8: whether recurrent states are kept in int8.
    """

    config: ModelConfig
    mesh: AnyMesh
    int8: bool = False

    @property
    def count(self) -> int:
        """Pieces of a leaf. It follows from the config alone, so that all meshes write and find the same leaves."""
        return math.gcd(self.config.kda_num_heads, MOST)

    def cut(self, leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """`engine.Checkpoint.state` in pieces, on the host."""
        arrays = {}
        for name, leaf in leaves.items():
            axis, array = _HEADS.get(_end(name)), np.asarray(leaf)
            if axis is None:
                arrays[name] = array
                continue
            for number, piece in enumerate(np.split(array, self.count, axis)):
                arrays[_piece(number, name)] = piece
        return arrays

    def read(self, read: Read) -> dict[str, ArrayLike]:
        """The leaves again, those of heads over the devices: each place on the axis "tensor" reads its own pieces.

        Raises:
            OSError: if any place cannot read its own: then nobody has anything.
        """
        whole, cut = self._names()
        places = self.mesh.shape[TENSOR]
        leaves: dict[str, ArrayLike] = dict(read(whole))
        parts = [self._part(read, cut, place, places) for place in range(places)]
        return leaves | {name: self._over_devices(name, [part[name] for part in parts]) for name in cut}

    def _names(self) -> tuple[list[str], list[str]]:
        """Leaves that are whole, and those that are cut."""
        recurrent = ("recurrent.values", "recurrent.scales") if self.int8 else ("recurrent",)
        fields = {"kda": ("position", "conv", *recurrent), "mla": ("position", "latent")}
        names = [f"layers.{i}.{field}" for i, kind in enumerate(self.config.layers) for field in fields[kind]]
        cut = [name for name in names if _end(name) in _HEADS]
        return [name for name in names if name not in cut], cut

    def _part(self, read: Read, names: Sequence[str], place: int, places: int) -> dict[str, np.ndarray]:
        """What one place holds. Where its first head lies inside a piece, it reads that piece from its beginning."""
        first, end = place * self.count // places, -(-(place + 1) * self.count // places)
        numbers = range(first, end)
        arrays = read([_piece(number, name) for number in numbers for name in names])
        part = {}
        for name in names:
            axis = _HEADS[_end(name)]
            run = np.concatenate([arrays[_piece(number, name)] for number in numbers], axis)
            piece = run.shape[axis] // len(numbers)
            size, at = piece * self.count // places, piece * self.count * place // places - piece * first
            part[name] = run[(slice(None),) * axis + (slice(at, at + size),)]
        return part

    def _over_devices(self, name: str, parts: Sequence[np.ndarray]) -> jax.Array:
        axis, shape = _HEADS[_end(name)], list(parts[0].shape)
        size = shape[axis]
        shape[axis] *= len(parts)
        sharding = NamedSharding(automatic(self.mesh), PartitionSpec(*(None,) * axis, TENSOR))

        def own(index: tuple[slice, ...] | None) -> np.ndarray:
            return parts[0 if index is None else (index[axis].start or 0) // size]

        return jax.make_array_from_callback(tuple(shape), sharding, own)


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _piece(number: int, name: str) -> str:
    return f"heads.{number:02}.{name}"
