"""Kernel 2 of 3: from the inverses of a chunk's diagonal blocks to the inverse of the chunk, by block substitution."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.triton.cost import merge_cost
from pallas_kernels.kda.triton.tile import BLOCK, Plan, product


def merge(writes: jax.Array, plan: Plan) -> jax.Array:
    """(I + writes)^-1 [C, H, L, L] float32; blocks above the diagonal are not written.

    Args:
        writes: [C, H, L, L] as `intra` makes it: diagonal blocks inverted, nothing above.
    """
    spec = pl.BlockSpec((1, 1, plan.chunk, plan.chunk), lambda c, h: (c, h, 0, 0))
    return pl.pallas_call(
        functools.partial(_body, plan=plan),
        grid=writes.shape[:2],
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(writes.shape, writes.dtype),
        cost_estimate=merge_cost(plan, writes.shape[0]),
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=plan.interpret,
        name="kda_merge",
    )(writes)


def _body(writes_ref, inverse_ref, *, plan: Plan):
    multiply = functools.partial(product, plan=plan, fine=True)
    blocks = plan.chunk // BLOCK

    def block(i: int, j: int):
        return 0, 0, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)

    inverse = {}
    for i in range(blocks):
        inverse[i, i] = writes_ref[block(i, i)]
        for j in range(i):
            terms = (multiply(writes_ref[block(i, m)], inverse[m, j]) for m in range(j, i))
            inverse[i, j] = -multiply(inverse[i, i], functools.reduce(jnp.add, terms))
        for j in range(i + 1):
            inverse_ref[block(i, j)] = inverse[i, j]
