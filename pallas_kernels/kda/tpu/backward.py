"""The backward pass as two kernels: the states that the chunks meet, then the chunks from the last to the first.

The gradient of a chunk is JAX's own, of the function in `chunk.py`, taken inside the kernel. That function has no
positive exponent and no difference of sums, and neither has its derivative: a product's is a product, an
exponential's is the exponential again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.pallas import Sequence
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.tpu.chunk import chunk as chunk_function
from pallas_kernels.kda.tpu.chunk import decays, left, written
from pallas_kernels.kda.tpu.cost import backward_cost, states_cost
from pallas_kernels.kda.tpu.layout import (
    Layout,
    Operands,
    check_chunk,
    join,
    lay_out,
    load,
    operands,
    specs,
    split,
    widen,
    work_of,
)


def backward(
    x: Sequence,
    pack: Pack | None,
    d_out: jax.Array,
    d_finals: jax.Array,
    *,
    scale: float,
    chunk: int | None,
    interpret: bool,
) -> Sequence:
    """A `pallas.Backward`; `chunk` is 64 or None.

    Raises:
        ValueError: another chunk.
    """
    check_chunk(chunk)
    layout = lay_out(pack, *x.q.shape[:2])
    read, states = operands(x, layout), widen(x.states)
    met = _met(read, states, layout, interpret)
    d_rows = split(d_out, layout, read.v.shape[2] // x.v.shape[2])
    d, d_states = _call(read, met, d_rows, widen(d_finals), layout, scale, interpret)
    inside = (..., slice(x.states.shape[2]), slice(x.states.shape[3]))
    d_states = jnp.where((layout.pack.count > 0)[:, None, None, None], d_states[inside], d_finals)
    d_beta = join(jnp.moveaxis(d.beta[:, :, 0], 1, 2), layout, (*x.beta.shape, 1))[..., 0]
    d_q, d_k, d_v, d_g = (
        join(part, layout, whole.shape) for part, whole in ((d.q, x.q), (d.k, x.k), (d.v, x.v), (d.g, x.g))
    )
    return Sequence(d_q, d_k, d_v, d_g, d_beta.astype(x.beta.dtype), d_states)


def _met(x: Operands, states: jax.Array, layout: Layout, interpret: bool) -> jax.Array:
    """The state that each chunk meets, [C, H, K, V]."""
    heads, keys, values = states.shape[1:]
    chunks = x.q.shape[0]
    return pl.pallas_call(
        _states_body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads, chunks),
            in_specs=[
                *specs(keys, values, lambda c: c)[1:],
                pl.BlockSpec((1, 1, keys, values), lambda h, c, owner, *_: (owner[c], h, 0, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1, keys, values), lambda h, c, *_: (c, h, 0, 0)),
            scratch_shapes=[pltpu.VMEM((keys, values), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((chunks, *states.shape[1:]), jnp.float32),
        cost_estimate=states_cost(work_of(x, states)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="kda_states",
    )(layout.owner, layout.begins, *x[1:], states)


def _states_body(
    owner_ref, begins_ref, k_ref, g_ref, v_ref, beta_ref, states_ref, met_ref, state_ref
):  # fmt: skip
    @pl.when(begins_ref[pl.program_id(1)] == 1)
    def _():
        state_ref[...] = states_ref[0, 0]

    state = state_ref[...]
    met_ref[0, 0] = state
    k, g, v, beta = load(k_ref, g_ref, v_ref, beta_ref)
    d = decays(g)
    state_ref[...] = left(k, g, d.tail, written(k, v, beta, d, state), state)


def _call(
    x: Operands,
    met: jax.Array,
    d_out: jax.Array,
    d_finals: jax.Array,
    layout: Layout,
    scale: float,
    interpret: bool,
) -> tuple[Operands, jax.Array]:
    """The gradients of the operands and of the first states."""
    heads, keys, values = met.shape[1:]
    chunks = met.shape[0]

    def chunk_at(c):
        return chunks - 1 - c

    rows = specs(keys, values, chunk_at)
    *_, d_out_rows, _ = rows
    state = pl.BlockSpec((1, 1, keys, values), lambda h, c, owner, *_: (owner[chunk_at(c)], h, 0, 0))
    *d, d_states = pl.pallas_call(
        functools.partial(_body, scale=scale, chunk_at=chunk_at),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads, chunks),
            in_specs=[
                *rows,
                pl.BlockSpec((1, 1, keys, values), lambda h, c, *_: (chunk_at(c), h, 0, 0)),
                d_out_rows,
                state,
            ],
            out_specs=[*rows, state],
            scratch_shapes=[pltpu.VMEM((keys, values), jnp.float32)],
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in x),
            jax.ShapeDtypeStruct(d_finals.shape, jnp.float32),
        ],
        cost_estimate=backward_cost(work_of(x, d_finals)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="kda_backward",
    )(layout.owner, layout.ends, *x, met, d_out, d_finals)
    return Operands(*d), d_states


def _body(
    owner_ref, ends_ref, q_ref, k_ref, g_ref, v_ref, beta_ref, met_ref, d_out_ref, d_finals_ref, d_q_ref, d_k_ref,
    d_g_ref, d_v_ref, d_beta_ref, d_states_ref, d_state_ref, *, scale: float, chunk_at: Callable[[Any], Any],
):  # fmt: skip
    @pl.when(ends_ref[chunk_at(pl.program_id(1))] == 1)
    def _():
        d_state_ref[...] = d_finals_ref[0, 0]

    q, rest = q_ref[0].astype(jnp.float32), load(k_ref, g_ref, v_ref, beta_ref)
    pull = jax.vjp(chunk_function, q, *rest, met_ref[0, 0])[1]
    *d, d_beta, d_state = pull((d_out_ref[0].astype(jnp.float32) * scale, d_state_ref[...]))
    for ref, gradient in zip((d_q_ref, d_k_ref, d_g_ref, d_v_ref), d, strict=True):
        ref[0] = gradient.astype(ref.dtype)
    d_beta_ref[0, 0] = d_beta
    d_state_ref[...] = d_state
    d_states_ref[0, 0] = d_state
