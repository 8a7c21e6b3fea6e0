"""Parts of parameters, read from the tensors that fill them: to where they stay, or through a small buffer."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.config import ModelConfig
from kda_jax.weights.errors import WeightsError
from kda_jax.weights.files import Tensors
from kda_jax.weights.names import Target, Tensor
from kda_jax.weights.table import PACKED_KIND, SCALE_KIND
from kda_jax.weights.transforms import TRANSFORMS, padding

NUMPY_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16, "U8": jnp.uint8}
BLOCK_NBYTES = 1 << 20
"""Bytes that are read at once: few enough to stay in a core's cache while they are transposed and looked through."""
_PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)

Box = tuple[slice, ...]


class Source(NamedTuple):
    """A tensor in the files, and which of its targets is meant."""

    name: str
    tensor: Tensor
    which: int


class Block(NamedTuple):
    """Some of a tensor, and where it goes.

    Attributes:
        rows, columns: the part of the tensor.
        of_value: what of the array that the transform makes of that part is wanted.
        of_place: where in the place that is filled.
    """

    rows: slice
    columns: slice
    of_value: Box
    of_place: Box


class Parts:
    """Reads parts of a model's parameters.

    Attributes:
        nonfinite: names of the tensors, among what was read, that hold NaN or infinity.
    """

    def __init__(self, files: Tensors, config: ModelConfig, on_read: Callable[[int], object]) -> None:
        """Makes a reader.

        Args:
            files: where the tensors are.
            config: the checkpoint's config.
            on_read: told the bytes of each block of a tensor once its values are in place.
        """
        self.nonfinite: list[str] = []
        self._files, self._config, self._on_read = files, config, on_read
        self._buffer = np.empty(BLOCK_NBYTES, np.uint8)

    def read(self, sources: Sequence[Source], shape: jax.ShapeDtypeStruct, box: Box) -> np.ndarray:
        """One part of a parameter.

        Of the files it reads what that part holds: of experts those in it, of a matrix any part, of other tensors whole
        rows.

        Args:
            sources: the tensors that fill the parameter.
            shape: the parameter's.
            box: one slice an axis; both ends are numbers.

        Returns:
            The part, at an address from which XLA's CPU client takes it over without a copy.

        Raises:
            WeightsError: if a tensor holds what its place does not take.
        """
        values = _empty(tuple(cut.stop - cut.start for cut in box), np.dtype(shape.dtype))
        filled: set[Target] = set()
        for source in sources:
            target = source.tensor.targets[source.which]
            whole = target.box(shape.shape)
            common = tuple(map(_overlap, whole, box))
            if all(cut.start < cut.stop for cut in common):
                place, within = values[_counted_from(box, common)], _counted_from(whole, common)
                if target.expert is not None:
                    place, within, whole = place[0], within[1:], whole[1:]
                for block in self._blocks(source, within, whole):
                    self._fill(source, block, place[block.of_place], is_copy=target in filled)
            filled.add(target)
        return values

    def _blocks(self, source: Source, within: Box, whole: Box) -> Iterator[Block]:
        """Cuts what is `within` the array that a tensor makes, which is as large as `whole`."""
        transform, shape = TRANSFORMS[source.tensor.transform], self._files.shapes[source.name]
        columns, rest, axis = slice(0, math.prod(shape[1:])), list(within), transform.rows_axis
        if axis is None:
            yield Block(slice(0, shape[0]), columns, within, ())
            return
        if transform.columns_axis is not None and len(shape) == 2:
            columns, rest[transform.columns_axis] = within[transform.columns_axis], slice(None)
        # rows of the tensor for one entry along the axis
        each = shape[0] // (whole[axis].stop - whole[axis].start)
        nbytes = each * (columns.stop - columns.start) * self._dtype(source).itemsize
        first, last, rest[axis] = within[axis].start, within[axis].stop, slice(None)
        step = max(1, BLOCK_NBYTES // nbytes)
        for start in range(first, last, step):
            stop = min(start + step, last)
            of_place = (*(slice(None),) * axis, slice(start - first, stop - first))
            yield Block(slice(each * start, each * stop), columns, tuple(rest), of_place)

    def _fill(self, source: Source, block: Block, place: np.ndarray, is_copy: bool) -> None:
        """Fills `place` with a block; where it was filled already, with a copy, both must agree."""
        transform, dtype = TRANSFORMS[source.tensor.transform], self._dtype(source)
        if transform.is_identity and place.dtype == dtype and place.flags.c_contiguous and not is_copy:
            self._files.read(source.name, block.rows, block.columns, place)
            stored = place
        else:
            stored = self._stored(source, block)
            value = transform.to_ours(stored, self._config)[source.which][block.of_value]
            with np.errstate(over="ignore"):  # what overflows is found below
                if not is_copy:
                    place[...] = value
                elif not np.array_equal(place, value.astype(place.dtype)):
                    raise WeightsError(f"{source.name} differs from the embedding that the config ties it to")
        self._check(source, stored, place)
        self._on_read(stored.nbytes)

    def _stored(self, source: Source, block: Block) -> np.ndarray:
        """A block of a tensor in the buffer, until the next one."""
        shape, dtype = self._files.shapes[source.name], self._dtype(source)
        rows, columns = block.rows.stop - block.rows.start, block.columns.stop - block.columns.start
        inner = shape[1:] if columns == math.prod(shape[1:]) else (columns,)
        nbytes = rows * columns * dtype.itemsize
        if nbytes > len(self._buffer):
            self._buffer = np.empty(nbytes, np.uint8)
        stored = self._buffer[:nbytes].view(dtype).reshape(rows, *inner)
        self._files.read(source.name, block.rows, block.columns, stored)
        return stored

    def _check(self, source: Source, stored: np.ndarray, place: np.ndarray) -> None:
        name, tensor = source.name, source.tensor
        beyond = padding(tensor.transform, stored, self._config)
        # contiguous, if both are the same; after a conversion, which may overflow, the values that are kept
        values = stored if stored.dtype == place.dtype else place
        if not _finite(values, tensor.kind) or not _finite(beyond, tensor.kind):
            if name not in self.nonfinite:
                self.nonfinite.append(name)
        elif beyond.any():
            raise WeightsError(
                f"{name}: shape {list(stored.shape)} for {self._config.kda_value_heads} heads, but the values "
                "beyond them are not zeros"
            )

    def _dtype(self, source: Source) -> np.dtype:
        return np.dtype(NUMPY_DTYPES[self._files.dtypes[source.name]])


def whole_box(shape: tuple[int, ...]) -> Box:
    """All of an array."""
    return tuple(slice(0, size) for size in shape)


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _counted_from(origin: Box, box: Box) -> Box:
    """A box inside another, in the other's own numbers."""
    return tuple(slice(cut.start - at.start, cut.stop - at.start) for at, cut in zip(origin, box))


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of zeros in pages of its own, which are aligned, are there at once, and go back when it does.

    `np.empty` asks for huge pages: where free memory is in pieces, it took Linux four times as long to join them.
    """
    pages = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=_PAGES)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def _finite(values: np.ndarray, stored: str) -> bool:
    """Whether no exponent is all ones, looked up in the bits: numpy has no fast test for bfloat16."""
    if stored in (PACKED_KIND, SCALE_KIND):
        return stored == PACKED_KIND or not (values == 255).any()
    kind = jnp.finfo(values.dtype)
    mask = np.array(((1 << kind.nexp) - 1) << kind.nmant, f"u{values.dtype.itemsize}")
    return bool((values.view(mask.dtype) & mask).max(initial=0) != mask)
