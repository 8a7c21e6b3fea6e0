"""Kernel 2 of 2: one mean out of those over the splits of a sequence, in the splits' order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.mla_attention.triton.cost import combine_cost
from pallas_kernels.mla_attention.triton.plan import Plan, pieces, rows_a_split


def combine(
    means: jax.Array,
    norms: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    plan: Plan,
    dtype: jnp.dtype,
) -> jax.Array:
    """The means weighted by 2^norms, [B, H, R] of a dtype.

    Args:
        means: float32 [B, splits, H, R]; norms: float32 [B, splits, H]; both as `attend` writes them.
        start, lengths: [B] int32, as `attend` had them.
    """
    batch, _, heads, rank = means.shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_body, plan=plan),
        grid=(heads, batch),
        in_specs=[whole] * 4,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((batch, heads, rank), dtype),
        cost_estimate=combine_cost(plan, batch, dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=plan.interpret,
        name="mla_combine",
    )(start, lengths, means, norms)


def _body(start_ref, lengths_ref, means_ref, norms_ref, out_ref, *, plan: Plan):
    h, b = pl.program_id(0), pl.program_id(1)
    seen = jnp.where(lengths_ref[b] > 0, jnp.minimum(start_ref[b] + 1, plan.capacity), 0)
    share = jnp.maximum(rows_a_split(seen, plan), 1)
    live = jax.lax.div(seen + share - 1, share)
    top = jax.lax.fori_loop(
        0, live, lambda s, top: jnp.maximum(top, norms_ref[b, s, h]), jnp.float32(-jnp.inf)
    )

    for first, count in pieces(0, plan.rank):
        slot = pl.ds(first, count)

        def add(s, carry, slot=slot):
            total, mixed = carry
            weight = jnp.exp2(norms_ref[b, s, h] - top)
            return total + weight, mixed + weight * means_ref[b, s, h, slot]

        empty = jnp.float32(0), jnp.zeros((count,), jnp.float32)
        total, mixed = jax.lax.fori_loop(0, live, add, empty)
        # Without a split there is no query: 0 of nothing is 0.
        out_ref[b, h, slot] = (mixed / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
