"""`kda_prefill` on GPUs: its kernels, and the program of them all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.check.cases.case import Case, like, total
from pallas_kernels.kda import kda_prefill
from pallas_kernels.kda.table import Marks, Table, num_chunks
from pallas_kernels.kda.triton.cost import intra_cost, merge_cost, state_cost
from pallas_kernels.kda.triton.intra import Matrices, intra
from pallas_kernels.kda.triton.merge import merge
from pallas_kernels.kda.triton.state import advance
from pallas_kernels.kda.triton.tile import Plan
from pallas_kernels.shapes import Shape

MARKS = 2


def kda_forward(shape: Shape) -> Iterator[Case]:
    """The kernels of a forward pass in both dtypes, the state's also with boundaries, and the pass whole."""
    for dtype in (jnp.bfloat16, jnp.float32):
        kernels = list(_forward(shape, jnp.dtype(dtype)))
        yield from kernels
        yield _program(shape, jnp.dtype(dtype), total(case.cost for case in kernels[:3]))


def _forward(shape: Shape, dtype: jnp.dtype) -> Iterator[Case]:
    plan = Plan(shape.tokens, shape.heads, shape.keys, shape.values, work=dtype)
    chunks, length = num_chunks(1, shape.tokens, plan.chunk), plan.chunk
    q = like((shape.tokens, shape.heads * shape.keys), dtype)
    v = like((shape.tokens, shape.heads * shape.values), dtype)
    beta = like((shape.tokens, shape.heads))
    square = like((chunks, shape.heads, length, length))
    wide = like((chunks, shape.heads, length, shape.keys), dtype)
    decay = like((chunks, shape.heads, shape.keys))
    matrices = Matrices(square, like(square.shape, dtype), wide, wide, wide, decay)
    table = Table(like((chunks,), jnp.int32), like((chunks,), jnp.int32), like((3,), jnp.int32))
    states = like((1, shape.heads, shape.keys, shape.values))

    def case(kernel: str, function: Callable[..., Any], cost: pl.CostEstimate, *arguments: Any) -> Case:
        part = kernel.split(",")[0]
        return Case(kernel, (part,), 1, "forward", shape.name, dtype.name, function, arguments, cost)

    yield case(
        "kda_intra",
        lambda q, k, g, beta, table: intra(q, k, g, beta, table, plan),
        intra_cost(plan, chunks, dtype),
        *(q, q, like(q.shape), beta, table),
    )
    yield case("kda_merge", lambda writes: merge(writes, plan), merge_cost(plan, chunks), square)
    for marked, name in ((0, "kda_state"), (MARKS, "kda_state, boundaries")):
        marks = Marks(like((1, marked), jnp.int32), like((1, marked), jnp.int32))
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
    keys, values = like((*heads, shape.keys), dtype), like((*heads, shape.values), dtype)
    return Case(
        "kda_prefill",
        ("kda_intra", "kda_merge", "kda_state"),
        4,
        "forward",
        shape.name,
        dtype.name,
        functools.partial(kda_prefill, implementation="triton"),
        (keys, keys, values, like(keys.shape), like(heads)),
        cost,
    )
