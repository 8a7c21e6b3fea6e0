"""`kda_prefill` on GPUs: its kernels, and the program of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.check.cases.case import Case, like, total
from pallas_kernels.kda import Gate, kda_prefill
from pallas_kernels.kda.table import Marks, Table, num_chunks
from pallas_kernels.kda.triton.cost import intra_cost, state_cost
from pallas_kernels.kda.triton.intra import Matrices, intra
from pallas_kernels.kda.triton.state import advance
from pallas_kernels.kda.triton.tile import Plan
from pallas_kernels.shapes import Shape

MARKS = 2


def kda_forward(shape: Shape) -> Iterator[Case]:
    """The kernels of a forward pass in both dtypes, the state's also with boundaries, and the pass whole."""
    for dtype in (jnp.bfloat16, jnp.float32):
        yield from _forward(shape, jnp.dtype(dtype))
        yield _program(shape, jnp.dtype(dtype))


def _forward(shape: Shape, dtype: jnp.dtype) -> Iterator[Case]:
    """The kernels, of queries and keys as they are given and of log decays."""
    plan = Plan(shape.tokens, shape.heads, shape.keys, shape.values, work=dtype)
    chunks, length = num_chunks(1, shape.tokens, plan.chunk), plan.chunk
    q = like((shape.tokens, shape.heads * shape.keys), dtype)
    v = like((shape.tokens, shape.heads * shape.values), dtype)
    beta = like((shape.tokens, shape.heads))
    inverse, pairs = (like((chunks, shape.heads, length, length), dtype) for dtype in plan.squares)
    wide = like((chunks, shape.heads, length, shape.keys), dtype)
    matrices = Matrices(inverse, pairs, wide, wide, wide, like((chunks, shape.heads, shape.keys)))
    table = Table(like((chunks,), jnp.int32), like((chunks,), jnp.int32), like((3,), jnp.int32))
    states = like((1, shape.heads, shape.keys, shape.values))

    def case(kernel: str, function: Callable[..., Any], cost: pl.CostEstimate, *arguments: Any) -> Case:
        part = kernel.split(",")[0]
        return Case(kernel, (part,), 1, "forward", shape.name, dtype.name, function, arguments, cost)

    yield case(
        "kda_intra",
        lambda q, k, g, beta, table: intra(q, k, g, beta, table, plan),
        intra_cost(plan, chunks, dtype, jnp.dtype(jnp.float32)),
        *(q, q, like(q.shape), beta, table),
    )
    for marked, name in ((0, "kda_state"), (MARKS, "kda_state, boundaries")):
        marks = Marks(like((1, marked), jnp.int32), like((1, marked), jnp.int32))
        yield case(
            name,
            lambda v, beta, matrices, states, table, marks: advance(
                v, beta, matrices, states, table, marks, plan, 1.0
            ),
            state_cost(plan, chunks, 1, marked, dtype),
            *(v, beta, matrices, states, table, marks),
        )


def _program(shape: Shape, dtype: jnp.dtype) -> Case:
    """`kda_prefill` as a layer jits it, of raw projections: L2 norm and gate are inside. Beside its kernels only the
    states' zeros may be filled."""
    heads = (1, shape.tokens, shape.heads)
    keys, values = like((*heads, shape.keys), dtype), like((*heads, shape.values), dtype)
    parameters = like((shape.heads,)), like((shape.heads, shape.keys))

    def run(q, k, v, z, beta, A_log, dt_bias) -> tuple[jax.Array, ...]:
        gate = Gate(A_log, dt_bias, shape.gate_lower_bound)
        return kda_prefill(q, k, v, z, beta, qk_l2norm=True, gate=gate, implementation="triton")

    plan = Plan(
        *(shape.tokens, shape.heads, shape.keys, shape.values),
        work=dtype,
        qk_l2norm=True,
        gated=True,
        lower_bound=shape.gate_lower_bound,
    )
    chunks = num_chunks(1, shape.tokens, plan.chunk)
    return Case(
        "kda_prefill",
        ("kda_intra", "kda_state"),
        4,
        "forward",
        shape.name,
        dtype.name,
        run,
        (keys, keys, values, keys, like(heads), *parameters),
        total((intra_cost(plan, chunks, dtype, dtype), state_cost(plan, chunks, 1, 0, dtype))),
    )
