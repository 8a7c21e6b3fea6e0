"""Packed experts in a checkpoint's files: which there are, and reading them as plain matrices."""

from __future__ import annotations

import numpy as np

from kda_jax.weights.files import Tensors
from pallas_kernels.mxfp4 import BLOCK, VALUES

_PACKED, _SCALE, _PLAIN = ".weight_packed", ".weight_scale", ".weight"
_VALUES = np.array(VALUES, np.float32)


def has_packed_experts(files: Tensors) -> bool:
    """Whether the routed experts lie in the files as MXFP4. Their config does not always say so."""
    return any(".experts." in name and name.endswith(_PACKED) for name in files.shapes)


def unpacked(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What `pallas_kernels.unpack_mxfp4` makes of uint8 [F, D/2] and [F, D/32]: float32 [F, D], NaN for scale 255."""
    blocks = _VALUES[np.stack((packed & 15, packed >> 4), axis=-1)].reshape(*scale.shape, BLOCK)
    power = (scale.astype(np.uint32) << 23).view(np.float32)
    power[scale == 255] = np.nan
    return (blocks * power[..., None]).reshape(*packed.shape[:-1], -1)


class UnpackedFiles:
    """The same files with every packed matrix under its plain name, as float32; each is unpacked when it is read."""

    def __init__(self, files: Tensors) -> None:
        self._files = files
        self._parts: dict[str, tuple[str, str]] = {}
        self.shapes, self.dtypes = dict(files.shapes), dict(files.dtypes)
        for name in files.shapes:
            scale = name.removesuffix(_PACKED) + _SCALE
            if not name.endswith(_PACKED) or not self._fit(name, scale):
                continue
            plain = name.removesuffix(_PACKED) + _PLAIN
            rows, half = self.shapes.pop(name)
            del self.shapes[scale], self.dtypes[scale], self.dtypes[name]
            self.shapes[plain], self.dtypes[plain] = (rows, 2 * half), "F32"
            self._parts[plain] = name, scale

    def _fit(self, packed: str, scale: str) -> bool:
        """Whether the two are the halves of one matrix; what is not keeps its name, for the error that names it."""
        shape = self.shapes[packed]
        due = (*shape[:-1], 2 * shape[-1] // BLOCK)
        return (
            len(shape) == 2
            and self.shapes.get(scale) == due
            and self.dtypes[packed] == self.dtypes[scale] == "U8"
        )

    def read(self, name: str, rows: slice, columns: slice, into: np.ndarray) -> None:
        """As `Tensors.read`; what is unpacked is whole blocks of columns."""
        if name not in self._parts:
            self._files.read(name, rows, columns, into)
            return
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        count = rows.stop - rows.start
        packed = np.empty((count, (last - first) * BLOCK // 2), np.uint8)
        scale = np.empty((count, last - first), np.uint8)
        packed_name, scale_name = self._parts[name]
        self._files.read(packed_name, rows, slice(first * BLOCK // 2, last * BLOCK // 2), packed)
        self._files.read(scale_name, rows, slice(first, last), scale)
        begin = columns.start - first * BLOCK
        values = unpacked(packed, scale)[:, begin : begin + columns.stop - columns.start]
        into.reshape(values.shape)[...] = values
