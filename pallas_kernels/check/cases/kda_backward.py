"""The gradient of `kda_prefill` on GPUs: its own kernels, and the program of them and of those of the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.check.cases.case import Case, like, total
from pallas_kernels.kda.pallas import Sequence
from pallas_kernels.kda.table import Table, num_chunks
from pallas_kernels.kda.triton.backward import backward
from pallas_kernels.kda.triton.backward.contract import Gradients, contract
from pallas_kernels.kda.triton.backward.cost import contract_cost, pull_back_cost, retreat_cost, states_cost
from pallas_kernels.kda.triton.backward.pull_back import pull_back
from pallas_kernels.kda.triton.backward.retreat import retreat
from pallas_kernels.kda.triton.backward.states import trace_states
from pallas_kernels.kda.triton.cost import intra_cost
from pallas_kernels.kda.triton.intra import Matrices
from pallas_kernels.kda.triton.tile import Plan
from pallas_kernels.shapes import Shape


def kda_backward(shape: Shape) -> Iterator[Case]:
    """The kernels of a backward pass in both dtypes, and the pass whole."""
    for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        plan = Plan(
            shape.tokens, shape.heads, shape.keys, shape.values, work=dtype, ends=jnp.dtype(jnp.float32)
        )
        kernels = list(_kernels(shape, dtype, plan))
        yield from kernels
        chunks = num_chunks(1, shape.tokens, plan.chunk)
        again = intra_cost(plan, chunks, dtype, jnp.dtype(jnp.float32))
        yield _program(shape, dtype, total([again, *(case.cost for case in kernels)]))


def _kernels(shape: Shape, dtype: jnp.dtype, plan: Plan) -> Iterator[Case]:
    chunks, length = num_chunks(1, shape.tokens, plan.chunk), plan.chunk
    keys = like((shape.tokens, shape.heads * shape.keys), dtype)
    values = like((shape.tokens, shape.heads * shape.values), dtype)
    g, beta = like(keys.shape), like((shape.tokens, shape.heads))
    square = like((chunks, shape.heads, length, length))
    wide = like((chunks, shape.heads, length, shape.keys), dtype)
    rows = like((chunks, shape.heads, length, shape.values))
    decay = like((chunks, shape.heads, shape.keys))
    matrices = Matrices(square, like(square.shape, dtype), wide, wide, like(wide.shape), decay)
    gradients = Gradients(square, square, wide, wide, wide, decay)
    table = Table(like((chunks,), jnp.int32), like((chunks,), jnp.int32), like((3,), jnp.int32))
    states = like((1, shape.heads, shape.keys, shape.values))
    trace = like((chunks, *states.shape[1:]))

    def case(kernel: str, function: Callable[..., Any], cost: pl.CostEstimate, *arguments: Any) -> Case:
        return Case(kernel, (kernel,), 1, "backward", shape.name, dtype.name, function, arguments, cost)

    yield case(
        "kda_states",
        functools.partial(trace_states, plan=plan),
        states_cost(plan, chunks, 1, dtype),
        *(values, beta, matrices, states, table),
    )
    yield case(
        "kda_retreat",
        functools.partial(retreat, plan=plan, scale=1.0),
        retreat_cost(plan, chunks, 1, dtype),
        *(values, beta, matrices, states, table),
    )
    yield case(
        "kda_contract",
        functools.partial(contract, plan=plan, scale=1.0),
        contract_cost(plan, chunks, dtype),
        *(values, values, beta, rows, rows, trace, trace, table),
    )
    yield case(
        "kda_pull_back",
        functools.partial(pull_back, plan=plan),
        pull_back_cost(plan, chunks, dtype),
        *(keys, keys, g, beta, gradients, table),
    )


def _program(shape: Shape, dtype: jnp.dtype, cost: pl.CostEstimate) -> Case:
    """The backward pass as a caller's gradient runs it; beside its kernels only beta's parts may be summed."""
    heads = (1, shape.tokens, shape.heads)
    keys, values = like((*heads, shape.keys), dtype), like((*heads, shape.values), dtype)
    states = like((1, shape.heads, shape.keys, shape.values))

    def run(x: Sequence, d_out: jax.Array, d_finals: jax.Array) -> Sequence:
        scale = shape.keys**-0.5
        return backward(x, None, d_out, d_finals, scale=scale, chunk=None, interpret=False)

    return Case(
        "kda_prefill, gradient",
        ("kda_intra", "kda_states", "kda_retreat", "kda_contract", "kda_pull_back"),
        6,
        "backward",
        shape.name,
        dtype.name,
        run,
        (Sequence(keys, keys, values, like(keys.shape), like(heads), states), values, states),
        cost,
    )
