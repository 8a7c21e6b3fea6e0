"""What a call of each kernel must do, by count: for the compiler's schedule and for `check`.

Bytes are those that inputs and outputs make necessary once; what a kernel reads again comes from a cache. Rows are
counted as if every sequence were written to the end of its capacity.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mla_attention.triton.plan import Plan


def attend_cost(plan: Plan, batch: int, queries: jnp.dtype, latents: jnp.dtype) -> pl.CostEstimate:
    """`attend` over a batch of queries and latents of two dtypes."""
    tokens = plan.num_rows // plan.heads
    pairs = batch * plan.heads * (tokens * plan.capacity - tokens * (tokens - 1) // 2)
    rows = batch * plan.num_rows
    read = plan.channels * (batch * plan.capacity * latents.itemsize + rows * queries.itemsize)
    written = rows * plan.splits * (plan.rank * plan.mean_dtype(queries).itemsize + 4)
    return pl.CostEstimate(
        flops=2 * pairs * (plan.channels + plan.rank),
        transcendentals=pairs,
        bytes_accessed=read + written,
    )


def combine_cost(plan: Plan, batch: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """`combine` over a batch, into a dtype."""
    means = batch * plan.splits * plan.num_rows
    written = batch * plan.num_rows * plan.rank * dtype.itemsize
    return pl.CostEstimate(
        flops=2 * means * plan.rank,
        transcendentals=means,
        bytes_accessed=4 * means * (plan.rank + 1) + written,
    )
