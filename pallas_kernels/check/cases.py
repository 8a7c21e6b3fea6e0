"""Every kernel at every shape: what to compile, and what it does by count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda import kda_prefill
from pallas_kernels.kda.table import Marks, Table, num_chunks
from pallas_kernels.kda.triton.cost import intra_cost, merge_cost, state_cost, step_cost
from pallas_kernels.kda.triton.intra import Matrices, intra
from pallas_kernels.kda.triton.merge import merge
from pallas_kernels.kda.triton.state import advance
from pallas_kernels.kda.triton.step import step
from pallas_kernels.kda.triton.tile import Plan
from pallas_kernels.shapes import Shape

MARKS = 2


class Case(NamedTuple):
    """One kernel at one shape, or the program that runs several.

    Attributes:
        kernel: its name for the reader.
        parts: the kernels in it, by the names they carry.
        most_kernels: as many may run, those that XLA adds included.
        function, arguments: what to compile, and its arguments' shapes and dtypes.
    """

    kernel: str
    parts: tuple[str, ...]
    most_kernels: int
    kind: str  # "forward" or "step"
    shape: str
    dtype: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cost: pl.CostEstimate


def cases(shape: Shape) -> Iterator[Case]:
    """The kernels of a forward pass in both dtypes, the state's also with boundaries, the pass whole, and the step."""
    for dtype in (jnp.bfloat16, jnp.float32):
        kernels = list(_forward(shape, jnp.dtype(dtype)))
        yield from kernels
        yield _program(shape, jnp.dtype(dtype), _sum(case.cost for case in kernels[:3]))
    rows = (shape.rows, shape.heads)
    yield Case(
        "kda_step",
        ("kda_step",),
        1,
        "step",
        shape.name,
        "float32",
        functools.partial(step, interpret=False),
        (
            *(_like((*rows, size)) for size in (shape.keys, shape.keys, shape.values, shape.keys)),
            _like(rows),
            _like((4 * shape.rows, shape.heads, shape.keys, shape.values)),
            _like((shape.rows,), jnp.int32),
        ),
        step_cost(*rows, shape.keys, shape.values),
    )


def _forward(shape: Shape, dtype: jnp.dtype) -> Iterator[Case]:
    plan = Plan(shape.tokens, shape.heads, shape.keys, shape.values, work=dtype)
    chunks, length = num_chunks(1, shape.tokens, plan.chunk), plan.chunk
    q = _like((shape.tokens, shape.heads * shape.keys), dtype)
    v = _like((shape.tokens, shape.heads * shape.values), dtype)
    beta = _like((shape.tokens, shape.heads))
    square = _like((chunks, shape.heads, length, length))
    wide = _like((chunks, shape.heads, length, shape.keys), dtype)
    decay = _like((chunks, shape.heads, shape.keys))
    matrices = Matrices(square, _like(square.shape, dtype), wide, wide, wide, decay)
    table = Table(_like((chunks,), jnp.int32), _like((chunks,), jnp.int32), _like((3,), jnp.int32))
    states = _like((1, shape.heads, shape.keys, shape.values))

    def case(kernel: str, function: Callable[..., Any], cost: pl.CostEstimate, *arguments: Any) -> Case:
        part = kernel.split(",")[0]
        return Case(kernel, (part,), 1, "forward", shape.name, dtype.name, function, arguments, cost)

    yield case(
        "kda_intra",
        lambda q, k, g, beta, table: intra(q, k, g, beta, table, plan),
        intra_cost(plan, chunks, dtype),
        *(q, q, _like(q.shape), beta, table),
    )
    yield case("kda_merge", lambda writes: merge(writes, plan), merge_cost(plan, chunks), square)
    for marked, name in ((0, "kda_state"), (MARKS, "kda_state, boundaries")):
        marks = Marks(_like((1, marked), jnp.int32), _like((1, marked), jnp.int32))
        yield case(
            name,
            lambda v, beta, matrices, inverse, states, table, marks: advance(
                v, beta, matrices, inverse, states, table, marks, plan, 1.0
            ),
            state_cost(plan, chunks, 1, marked, dtype),
            *(v, beta, matrices, square, states, table, marks),
        )


def _program(shape: Shape, dtype: jnp.dtype, cost: pl.CostEstimate) -> Case:
    """`kda_prefill` as a caller jits it; beside its kernels only the states' zeros may be filled."""
    heads = (1, shape.tokens, shape.heads)
    keys, values = _like((*heads, shape.keys), dtype), _like((*heads, shape.values), dtype)
    return Case(
        "kda_prefill",
        ("kda_intra", "kda_merge", "kda_state"),
        4,
        "forward",
        shape.name,
        dtype.name,
        functools.partial(kda_prefill, implementation="triton"),
        (keys, keys, values, _like(keys.shape), _like(heads)),
        cost,
    )


def _like(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """A shape and dtype in an array's place."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _sum(costs: Iterator[pl.CostEstimate]) -> pl.CostEstimate:
    flops, transcendentals, moved = (
        sum(column) for column in zip(*((x.flops, x.transcendentals, x.bytes_accessed) for x in costs))
    )
    return pl.CostEstimate(flops=flops, transcendentals=transcendentals, bytes_accessed=moved)
