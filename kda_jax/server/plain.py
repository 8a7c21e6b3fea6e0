"""What the engine tells of itself, as json has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Named tuples and dataclasses as objects, tiers by their names, bytes in hexadecimal, NaN and infinity as null."""
    if value is None or (isinstance(value, bool | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, int | float):
        return value if np.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(item) for name, item in zip(value._fields, value)}  # pyright: ignore
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no form in json here")
