"""`short_conv` on GPUs, and its rows on TPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.check.cases.case import Case, like
from pallas_kernels.shapes import Shape
from pallas_kernels.short_conv import short_conv as convolve
from pallas_kernels.short_conv.cost import conv_cost

SEQUENCES, MARKS = 8, 2
PLATFORMS = {"triton": "gpu", "tpu": "tpu"}


def short_conv(shape: Shape) -> Iterator[Case]:
    """The convolution of a layer's q, k and v together: of one row, and of a pack with boundaries."""
    for dtype in (jnp.bfloat16, jnp.float32):
        for backend in PLATFORMS:
            run = functools.partial(_row, backend)
            yield _case(shape, dtype, "short_conv", run, backend, 1, 0, like((1,), jnp.int32))
        counts = like((SEQUENCES + 1,), jnp.int32), like((SEQUENCES, MARKS), jnp.int32)
        yield _case(
            shape, dtype, "short_conv, pack and boundaries", _pack, "triton", SEQUENCES, MARKS, *counts
        )


def _row(backend: str, x: jax.Array, weight: jax.Array, window: jax.Array, lengths: jax.Array):
    return convolve(x, weight, window, lengths=lengths, implementation=backend)


def _pack(x: jax.Array, weight: jax.Array, window: jax.Array, cu_seqlens: jax.Array, boundaries: jax.Array):
    return convolve(x, weight, window, cu_seqlens=cu_seqlens, boundaries=boundaries, implementation="triton")


def _case(
    shape: Shape, dtype: DTypeLike, kernel: str, run: Callable[..., Any], backend: str,
    sequences: int, marked: int, *counts: Any,
) -> Case:  # fmt: skip
    channels = shape.heads * (2 * shape.keys + shape.values)
    x, weight = like((1, shape.tokens, channels), dtype), like((shape.window, channels), dtype)
    window = like((sequences, shape.window - 1, channels), dtype)
    cost = conv_cost(x, weight, window, marked, "silu")
    arguments, name = (x, weight, window, *counts), jnp.dtype(dtype).name
    return Case(
        kernel, ("short_conv",), 1, "forward", shape.name, name, run, arguments, cost, PLATFORMS[backend]
    )
