"""The dtypes a checkpoint may hold, by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
PLAIN += ("float16", "float32", "float64", "complex64", "complex128")
# of ml_dtypes; those of fewer than 8 bits take a byte an element here as in memory
SHORT = ("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz")
SHORT += ("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn")
SHORT += ("float4_e2m1fn", "int2", "int4", "uint2", "uint4")

DTYPES: dict[str, np.dtype] = {name: np.dtype(name).newbyteorder("<") for name in PLAIN}
DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in SHORT}
"""By name, little-endian."""


def dtype_name(leaf: str, array: NDArray) -> str:
    """The name of an array's dtype.

    Raises:
        ValueError: for what a checkpoint does not hold, with the leaf's name: anything but a plain array, another byte
            order, and dtypes whose bytes mean nothing elsewhere (objects, structures, strings, dates, long doubles).
    """
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise ValueError(
            f"leaf {leaf!r} is a {type(array).__name__}; a checkpoint holds numpy arrays, np.asarray makes one"
        )
    known = DTYPES.get(array.dtype.name)
    if known is None:
        raise ValueError(
            f"leaf {leaf!r} has dtype {array.dtype}, which a checkpoint does not hold; it holds {', '.join(DTYPES)}"
        )
    if array.dtype != known:
        raise ValueError(
            f"leaf {leaf!r} is big-endian ({array.dtype.str}); convert it with .astype({known.str!r}), a checkpoint"
            " is little-endian"
        )
    return known.name
