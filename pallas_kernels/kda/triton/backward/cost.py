"""What a call of each kernel must do, by count, as `triton/cost.py` counts."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.triton.tile import BLOCK, Plan


def states_cost(plan: Plan, chunks: int, sequences: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`trace_states` over chunks of v of a dtype."""
    length, tile = plan.chunk, plan.keys * plan.values
    flops = 4 * length * tile + 2 * length * length * plan.values
    rows = plan.values * (jnp.dtype(dtype).itemsize + 4) + 4 + plan.keys * (plan.work.itemsize + _ends(plan))
    moved = length * rows + 4 * _lower(plan) + 4 * plan.keys + 4 * tile
    return _of_heads(plan, chunks, flops, 0, moved, once=4 * sequences * tile)


def retreat_cost(plan: Plan, chunks: int, sequences: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`retreat` over chunks of the output's gradient of a dtype."""
    length, tile = plan.chunk, plan.keys * plan.values
    flops = 6 * length * tile + 4 * length * length * plan.values
    rows = plan.values * (jnp.dtype(dtype).itemsize + 4) + 4
    rows += plan.keys * (2 * plan.work.itemsize + _ends(plan))
    squares = (4 + plan.work.itemsize) * _lower(plan)
    moved = length * rows + squares + 4 * plan.keys + 4 * tile
    return _of_heads(plan, chunks, flops, 0, moved, once=2 * 4 * sequences * tile)


def contract_cost(plan: Plan, chunks: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`contract` over chunks of v of a dtype."""
    length, tile = plan.chunk, plan.keys * plan.values
    flops = 6 * length * tile + 4 * length * length * plan.values + 2 * tile
    rows = plan.values * (3 * jnp.dtype(dtype).itemsize + 2 * 4) + 2 * 4 + 3 * plan.keys * plan.work.itemsize
    moved = length * rows + 2 * 4 * _lower(plan) + 4 * plan.keys + 2 * 4 * tile
    return _of_heads(plan, chunks, flops, 0, moved)


def pull_back_cost(plan: Plan, chunks: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`pull_back` over chunks of q and k of a dtype."""
    length, blocks = plan.chunk, plan.chunk // BLOCK
    pairs = blocks * (blocks - 1) // 2
    # inside a block: four multiply-adds a pair of rows and channel; between blocks: four products
    flops = 8 * BLOCK * BLOCK * plan.keys * (blocks + pairs)
    exponentials = plan.keys * BLOCK * (BLOCK * blocks + 3 * blocks + 2 * pairs)
    rows = plan.keys * (4 * jnp.dtype(dtype).itemsize + 2 * 4 + 3 * plan.work.itemsize)
    rows += 4 + 4 * (plan.keys // plan.key_slice)
    return _of_heads(plan, chunks, flops, exponentials, length * rows + 2 * 4 * _lower(plan) + 4 * plan.keys)


def _lower(plan: Plan) -> int:
    """Entries of a square's blocks on and below the diagonal."""
    blocks = plan.chunk // BLOCK
    return BLOCK * BLOCK * blocks * (blocks + 1) // 2


def _ends(plan: Plan) -> int:
    return (plan.ends or plan.work).itemsize


def _of_heads(
    plan: Plan, chunks: int, flops: int, transcendentals: int, moved: int, once: int = 0
) -> pl.CostEstimate:
    """Of all heads: so much a chunk, and bytes once."""
    return pl.CostEstimate(
        flops=plan.heads * chunks * flops,
        transcendentals=plan.heads * chunks * transcendentals,
        bytes_accessed=plan.heads * (chunks * moved + once),
    )
