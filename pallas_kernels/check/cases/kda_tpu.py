"""KDA on TPUs: the programs of `kda_prefill`, of its gradient and of `kda_step`, as a caller jits them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.check.cases.case import Case, like, total
from pallas_kernels.kda import kda_prefill, kda_step
from pallas_kernels.kda.tpu.chunk import CHUNK
from pallas_kernels.kda.tpu.cost import Work, backward_cost, forward_cost, states_cost, step_cost
from pallas_kernels.kda.tpu.layout import wide
from pallas_kernels.shapes import Shape

BOUNDARIES = (1000, 2000)


def kda_tpu(shape: Shape) -> Iterator[Case]:
    """The forward pass, also with boundaries, its gradient, and the step over a pool four times the batch."""
    for dtype in (jnp.bfloat16, jnp.float32):
        yield _forward(shape, jnp.dtype(dtype), ())
        yield _gradient(shape, jnp.dtype(dtype))
    yield _forward(shape, jnp.dtype(jnp.float32), BOUNDARIES)
    yield _step(shape)


def _forward(shape: Shape, dtype: jnp.dtype, boundaries: tuple[int, ...]) -> Case:
    return Case(
        "kda_chunks, boundaries" if boundaries else "kda_chunks",
        ("kda_chunks",),
        1,
        "forward",
        shape.name,
        dtype.name,
        functools.partial(kda_prefill, boundaries=boundaries or None, implementation="tpu"),
        _arguments(shape, dtype),
        forward_cost(_work(shape, dtype), len(boundaries)),
        platform="tpu",
    )


def _gradient(shape: Shape, dtype: jnp.dtype) -> Case:
    def pull(*x: jax.Array) -> Any:
        """The gradients of a call for given ones of its output and final state."""
        *arguments, d_out, d_final = x
        return jax.vjp(functools.partial(kda_prefill, implementation="tpu"), *arguments)[1]((d_out, d_final))

    work, arguments = _work(shape, dtype), _arguments(shape, dtype)
    states = like((1, shape.heads, shape.keys, shape.values))
    return Case(
        "kda_backward",
        ("kda_states", "kda_backward"),
        2,
        "backward",
        shape.name,
        dtype.name,
        pull,
        (*arguments, arguments[2], states),
        total((states_cost(work), backward_cost(work))),
        platform="tpu",
    )


def _step(shape: Shape) -> Case:
    rows = (shape.rows, shape.heads)
    return Case(
        "kda_step",
        ("kda_step",),
        1,
        "step",
        shape.name,
        "float32",
        lambda *x: kda_step(*x[:6], slots=x[6], implementation="tpu"),
        (
            *(like((*rows, size)) for size in (shape.keys, shape.keys, shape.values, shape.keys)),
            like(rows),
            like((4 * shape.rows, shape.heads, shape.keys, shape.values)),
            like((shape.rows,), jnp.int32),
        ),
        step_cost(*rows, shape.keys, shape.values),
        platform="tpu",
    )


def _arguments(shape: Shape, dtype: jnp.dtype) -> tuple[Any, ...]:
    """q, k, v, g and beta of one sequence."""
    heads = (1, shape.tokens, shape.heads)
    keys = like((*heads, shape.keys), dtype)
    return keys, keys, like((*heads, shape.values), dtype), like(keys.shape), like(heads)


def _work(shape: Shape, dtype: jnp.dtype) -> Work:
    keys, values = wide(shape.keys), wide(shape.values)
    return Work(-(-shape.tokens // CHUNK), 1, shape.heads, keys, values, dtype.itemsize)
