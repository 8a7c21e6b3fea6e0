"""`compress_state` and `decompress_state` on GPUs and TPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.check.cases.case import Case, like
from pallas_kernels.shapes import Shape
from pallas_kernels.state_compression import CompressedState, compress_state, decompress_state
from pallas_kernels.state_compression.cost import compress_cost, decompress_cost

PLATFORMS = {"triton": "gpu", "tpu": "tpu"}


def state_compression(shape: Shape) -> Iterator[Case]:
    """A layer's states of one decode step, there and back."""
    state = like((shape.rows, shape.heads, shape.keys, shape.values))
    small = CompressedState(like(state.shape, jnp.int8), like(state.shape[:-1]))
    rows = shape.rows * shape.heads * shape.keys

    def case(
        function: Callable[..., Any], cost: Callable[..., pl.CostEstimate], argument: Any, backend: str
    ) -> Case:
        run, name = functools.partial(function, implementation=backend), function.__name__
        counted, platform = cost(rows, shape.values), PLATFORMS[backend]
        return Case(name, (name,), 1, "step", shape.name, "float32", run, (argument,), counted, platform)

    for backend in PLATFORMS:
        yield case(compress_state, compress_cost, state, backend)
        yield case(decompress_state, decompress_cost, small, backend)
