"""What a call of each kernel must do, by count: for the compiler's schedule and for `check`.

Bytes are those that inputs and outputs make necessary once; what a kernel reads again comes from a cache. Of a square
matrix only the blocks of 16 on and below the diagonal are written and read. A gate's parameters are not counted.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.triton.tile import BLOCK, Plan


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """L, blocks in it, bytes of the blocks on and below the diagonal of its inverse and its pairs."""
    blocks = plan.chunk // BLOCK
    lower = BLOCK * BLOCK * blocks * (blocks + 1) // 2
    return plan.chunk, blocks, lower * sum(dtype.itemsize for dtype in plan.squares)


def intra_cost(plan: Plan, chunks: int, dtype: jnp.dtype, decays: jnp.dtype) -> pl.CostEstimate:
    """`intra` over chunks of q and k of a dtype and of g of another."""
    length, blocks, squares = _sizes(plan)
    earlier = blocks * (blocks - 1) // 2
    shared = 2 * length * plan.keys * jnp.dtype(dtype).itemsize
    read = length * (plan.keys * jnp.dtype(decays).itemsize + 4)
    wide = 2 * plan.work.itemsize + (plan.ends or plan.work).itemsize
    written = squares + length * plan.keys * wide + 4 * plan.keys
    # inside a block: two multiply-adds a pair of rows and channel; between blocks: two products
    pairs = 4 * BLOCK * BLOCK * plan.keys * (blocks + earlier)
    # a substitution in every diagonal block, then products of blocks
    products = sum((blocks - distance) * (distance + 1) for distance in range(1, blocks))
    inverse = 2 * BLOCK**3 * (blocks + products)
    exponentials = plan.keys * BLOCK * (BLOCK * blocks + 2 * blocks + 2 * earlier)
    if plan.gated:
        exponentials += 2 * length * plan.keys
    heads = chunks * plan.heads
    return pl.CostEstimate(
        flops=heads * (pairs + inverse),
        transcendentals=heads * exponentials,
        bytes_accessed=heads * (read + written) + heads // plan.repeats * shared,
    )


def state_cost(plan: Plan, chunks: int, sequences: int, marked: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`advance` over chunks of v of a dtype, with `marked` boundaries a sequence."""
    length, _, squares = _sizes(plan)
    tile = plan.keys * plan.values
    flops = 6 * length * tile + 4 * length * length * plan.values
    rows = 2 * plan.values * jnp.dtype(dtype).itemsize + 3 * plan.keys * plan.work.itemsize + 4
    moved = length * rows + squares + 4 * plan.keys
    once = sequences * (2 + marked) * 4 * tile
    inside = sequences * marked * 2 * length * tile
    return pl.CostEstimate(
        flops=plan.heads * (chunks * flops + inside),
        transcendentals=0,
        bytes_accessed=plan.heads * (chunks * moved + once),
    )


def step_cost(rows: int, heads: int, keys: int, values: int) -> pl.CostEstimate:
    """`step` over a batch of rows: the state in and out, everything else in float32."""
    moved = 2 * 4 * keys * values + 4 * (3 * keys + 2 * values + 1)
    count = rows * heads
    return pl.CostEstimate(
        flops=count * 7 * keys * values, transcendentals=count * keys, bytes_accessed=count * moved
    )
