"""What a call of each kernel must do, by count: for the compiler's schedule and for `check`.

Bytes are those that inputs and outputs make necessary once; what a kernel reads again comes from a cache. Of a square
matrix only the blocks of 16 on and below the diagonal are written and read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.triton.tile import BLOCK, Plan


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """L, blocks in it, entries of its blocks on and below the diagonal."""
    blocks = plan.chunk // BLOCK
    return plan.chunk, blocks, BLOCK * BLOCK * blocks * (blocks + 1) // 2


def intra_cost(plan: Plan, chunks: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`intra` over chunks of q and k of a dtype."""
    length, blocks, lower = _sizes(plan)
    pairs = blocks * (blocks - 1) // 2
    read = length * (2 * plan.keys * jnp.dtype(dtype).itemsize + 4 * plan.keys + 4)
    written = (4 + plan.work.itemsize) * lower + 3 * length * plan.keys * plan.work.itemsize + 4 * plan.keys
    # inside a block: two multiply-adds a pair of rows and channel; between blocks: two products
    flops = 4 * BLOCK * BLOCK * plan.keys * (blocks + pairs) + 2 * BLOCK**3 * blocks
    exponentials = plan.keys * BLOCK * (BLOCK * blocks + 2 * blocks + 2 * pairs)
    return _times(chunks * plan.heads, flops, exponentials, read + written)


def merge_cost(plan: Plan, chunks: int) -> pl.CostEstimate:
    """`merge` over chunks."""
    _, blocks, lower = _sizes(plan)
    products = sum((blocks - distance) * (distance + 1) for distance in range(1, blocks))
    return _times(chunks * plan.heads, 2 * BLOCK**3 * products, 0, 2 * 4 * lower)


def state_cost(plan: Plan, chunks: int, sequences: int, marked: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`advance` over chunks of v of a dtype, with `marked` boundaries a sequence."""
    length, _, lower = _sizes(plan)
    tile = plan.keys * plan.values
    flops = 6 * length * tile + 4 * length * length * plan.values
    rows = 2 * plan.values * jnp.dtype(dtype).itemsize + 3 * plan.keys * plan.work.itemsize + 4
    moved = length * rows + (4 + plan.work.itemsize) * lower + 4 * plan.keys
    once = sequences * (2 + marked) * 4 * tile
    inside = sequences * marked * 2 * length * tile
    per_chunk = _times(chunks * plan.heads, flops, 0, moved)
    return pl.CostEstimate(
        flops=per_chunk.flops + plan.heads * inside,
        transcendentals=0,
        bytes_accessed=per_chunk.bytes_accessed + plan.heads * once,
    )


def step_cost(rows: int, heads: int, keys: int, values: int) -> pl.CostEstimate:
    """`step` over a batch of rows: the state in and out, everything else in float32."""
    moved = 2 * 4 * keys * values + 4 * (3 * keys + 2 * values + 1)
    return _times(rows * heads, 7 * keys * values, keys, moved)


def _times(count: int, flops: int, transcendentals: int, moved: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=count * flops, transcendentals=count * transcendentals, bytes_accessed=count * moved
    )
