"""The sizes that kernels are checked at: those of real models, and a small one."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A KDA layer and how much it is given to do."""

    name: str
    tokens: int  # of one prefill
    rows: int  # of one decode step
    heads: int
    keys: int
    values: int


SHAPES = (
    Shape("kimi-linear-48b", tokens=8192, rows=64, heads=32, keys=128, values=128),
    Shape("kimi-k3", tokens=8192, rows=64, heads=96, keys=128, values=128),
    Shape("small", tokens=2048, rows=8, heads=4, keys=64, values=64),
)
