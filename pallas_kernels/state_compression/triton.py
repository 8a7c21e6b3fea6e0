"""Backend "triton" of the compressed state: a program takes a few whole rows, so each is read and written once."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.state_compression import reference
from pallas_kernels.state_compression.cost import compress_cost, decompress_cost
from pallas_kernels.state_compression.reference import CompressedState

TILE = 4096
"""Numbers of a program: 32 a thread."""


MOST = 2**31 - 1
"""Numbers of a call: places in arrays of bytes are counted in 32 bits."""


def refusal(shape: tuple[int, ...]) -> str | None:
    """Why no state of this shape can be done, or None."""
    if shape[-1] > TILE:
        return f"holds rows of at most {TILE} value channels, got V={shape[-1]}"
    size = math.prod(shape)
    return f"takes at most {MOST} numbers a call, got {size}" if size > MOST else None


def compress(state: jax.Array, *, interpret: bool) -> CompressedState:
    """`reference.compress` of a state [..., V] that has elements."""
    values = state.shape[-1]
    rows = state.size // values
    out = [jax.ShapeDtypeStruct((rows, values), jnp.int8), jax.ShapeDtypeStruct((rows,), jnp.float32)]
    quantised, scales = _call(
        _compress, "compress_state", compress_cost(rows, values), out, interpret, state.reshape(rows, values)
    )
    return CompressedState(quantised.reshape(state.shape), scales.reshape(state.shape[:-1]))


def decompress(compressed: CompressedState, *, interpret: bool) -> jax.Array:
    """`reference.decompress` of values [..., V] that have elements."""
    shape = compressed.values.shape
    rows, values = math.prod(shape[:-1]), shape[-1]
    out = jax.ShapeDtypeStruct((rows, values), jnp.float32)
    flat = compressed.values.reshape(rows, values), compressed.scales.reshape(rows)
    state = _call(_decompress, "decompress_state", decompress_cost(rows, values), out, interpret, *flat)
    return state.reshape(shape)


def _call(body, name: str, cost: pl.CostEstimate, out, interpret: bool, *arrays: jax.Array):
    """A body over all rows of arrays [rows, V] and [rows], `TILE` numbers a program."""
    rows, values = arrays[0].shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, TILE // pl.next_power_of_2(values)),),
        in_specs=[whole] * len(arrays),
        out_specs=jax.tree.map(lambda _: whole, out),
        out_shape=out,
        cost_estimate=cost,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arrays)


def _compress(state_ref, values_ref, scales_ref):
    at, row, live, live_row = _tile(state_ref.shape)
    result = reference.compress(pltriton.load(state_ref.at[at], mask=live, other=0.0))
    pltriton.store(values_ref.at[at], result.values, mask=live)
    pltriton.store(scales_ref.at[row], result.scales, mask=live_row)


def _decompress(values_ref, scales_ref, state_ref):
    at, row, live, live_row = _tile(values_ref.shape)
    values = pltriton.load(values_ref.at[at], mask=live, other=0)
    scales = pltriton.load(scales_ref.at[row], mask=live_row, other=0.0)
    pltriton.store(state_ref.at[at], reference.decompress(CompressedState(values, scales)), mask=live)


def _tile(shape: tuple[int, ...]) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array, jax.Array]:
    """A program's place in an array [rows, V] and in one [rows], and what of the two is there."""
    rows, values = shape
    width = pl.next_power_of_2(values)
    height = TILE // width
    own = pl.program_id(0) * height + jax.lax.broadcasted_iota(jnp.int32, (height,), 0)
    row, column = own[:, None], jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    return (row, column), own, (row < rows) & (column < values), own < rows
