"""One thing to compile: what every operator's cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class Case(NamedTuple):
    """One kernel at one shape, or the program that runs several.

    Attributes:
        kernel: its name for the reader.
        parts: the kernels in it, by the names they carry.
        most_kernels: as many may run, those that XLA adds included.
        kind: "forward", "backward" or "step".
        shape, dtype: of its inputs, for the reader.
        function, arguments: what to compile, and its arguments' shapes and dtypes.
        cost: what it does by count.
        platform: whose targets it is compiled for, "gpu" or "tpu".
        lacking: of those, the targets that lack what it needs.
    """

    kernel: str
    parts: tuple[str, ...]
    most_kernels: int
    kind: str
    shape: str
    dtype: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cost: pl.CostEstimate
    platform: str = "gpu"
    lacking: tuple[str, ...] = ()


def like(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """A shape and dtype in an array's place."""
    return jax.ShapeDtypeStruct(shape, dtype)


def total(costs: Iterable[pl.CostEstimate]) -> pl.CostEstimate:
    """What several kernels do together."""
    flops, transcendentals, moved = (
        sum(column) for column in zip(*((x.flops, x.transcendentals, x.bytes_accessed) for x in costs))
    )
    return pl.CostEstimate(flops=flops, transcendentals=transcendentals, bytes_accessed=moved)
