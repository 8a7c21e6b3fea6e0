"""Backend "tpu" of the compressed state: a program takes a few heads, whole."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.state_compression import reference
from pallas_kernels.state_compression.cost import compress_cost, decompress_cost
from pallas_kernels.state_compression.reference import CompressedState

HEADS = 8
"""Heads of a program: as many as a register has rows, for the scales."""

MOST = 256 * 256
"""Numbers of a head that leave room for both copies of a program's arrays."""


def refusal(shape: tuple[int, ...]) -> str | None:
    """Why no state of this shape can be done, or None."""
    keys, values = shape[-2:]
    return (
        f"holds heads of at most {MOST} numbers, got K={keys}, V={values}" if keys * values > MOST else None
    )


def compress(state: jax.Array, *, interpret: bool) -> CompressedState:
    """`reference.compress` of a state [..., K, V] that has elements."""
    heads, keys, values = math.prod(state.shape[:-2]), *state.shape[-2:]
    out = [
        jax.ShapeDtypeStruct((heads, keys, values), jnp.int8),
        jax.ShapeDtypeStruct((heads, keys), jnp.float32),
    ]
    quantised, scales = _call(
        _compress,
        "compress_state",
        compress_cost(heads * keys, values),
        out,
        interpret,
        state.reshape(heads, keys, values),
    )
    return CompressedState(quantised.reshape(state.shape), scales.reshape(state.shape[:-1]))


def decompress(compressed: CompressedState, *, interpret: bool) -> jax.Array:
    """`reference.decompress` of values [..., K, V] that have elements."""
    shape = compressed.values.shape
    heads, keys, values = math.prod(shape[:-2]), *shape[-2:]
    out = jax.ShapeDtypeStruct((heads, keys, values), jnp.float32)
    flat = compressed.values.reshape(heads, keys, values), compressed.scales.reshape(heads, keys)
    state = _call(
        _decompress, "decompress_state", decompress_cost(heads * keys, values), out, interpret, *flat
    )
    return state.reshape(shape)


def _call(body, name: str, cost: pl.CostEstimate, out, interpret: bool, *arrays: jax.Array):
    """A body over arrays [heads, K, V] and [heads, K], a few heads a program."""

    def block(x) -> pl.BlockSpec:
        return pl.BlockSpec((HEADS, *x.shape[1:]), lambda n: (n, *(0 for _ in x.shape[1:])))

    return pl.pallas_call(
        body,
        grid=(pl.cdiv(arrays[0].shape[0], HEADS),),
        in_specs=[block(x) for x in arrays],
        out_specs=jax.tree.map(block, out),
        out_shape=out,
        cost_estimate=cost,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=name,
    )(*arrays)


def _compress(state_ref, values_ref, scales_ref):
    values_ref[...], scales_ref[...] = reference.compress(state_ref[...])


def _decompress(values_ref, scales_ref, state_ref):
    state_ref[...] = reference.decompress(CompressedState(values_ref[...], scales_ref[...]))
