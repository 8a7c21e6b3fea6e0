"""Kernel 1 of 2: a tile of queries, with their heads, over a range of latent rows. One body for prefill and decode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.mla_attention.triton.cost import attend_cost
from pallas_kernels.mla_attention.triton.plan import CHANNELS, Plan, pieces, rows_a_split

LOG2_E = 1.4426950408889634

Columns: TypeAlias = slice | pl.Slice
Read: TypeAlias = Callable[[Columns], jax.Array]


def attend(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    plan: Plan,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention over each split's rows: means [B, splits, T * H, R], float32 or with one split in q's dtype, and the
    logarithms to base 2 of their weights, float32 [B, splits, T * H]. Splits without a row are not written.

    Args:
        q: [B, T * H, C].
        pool: [pages * page_size, C].
        page_table: [B, n] int32.
        start, lengths: [B] int32, rows written before this call and valid queries.
        scale: multiplies the scores.
    """
    batch = q.shape[0]
    tiles = -(-plan.num_rows // plan.tile)
    rows = plan.num_rows
    if (
        plan.interpret
    ):  # a masked row behind the end is neither read nor stored; a slice that reaches there is moved
        rows, pool = tiles * plan.tile, jnp.pad(pool, ((0, plan.keys), (0, 0)))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    means, norms = pl.pallas_call(
        functools.partial(_body, plan=plan, scale=scale * LOG2_E),
        grid=(tiles, plan.splits, batch),
        in_specs=[whole] * 5,
        out_specs=[whole, whole],
        out_shape=[
            jax.ShapeDtypeStruct((batch, plan.splits, rows, plan.rank), plan.mean_dtype(q.dtype)),
            jax.ShapeDtypeStruct((batch, plan.splits, rows), jnp.float32),
        ],
        cost_estimate=attend_cost(plan, batch, q.dtype, pool.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=plan.warps, num_stages=2 if plan.holds_queries else 1
        ),
        interpret=plan.interpret,
        name="mla_attend",
    )(start, lengths, page_table, q, pool)
    return (means[:, :, : plan.num_rows], norms[:, :, : plan.num_rows]) if plan.interpret else (means, norms)


def _body(
    start_ref, lengths_ref, table_ref, q_ref, pool_ref, means_ref, norms_ref, *, plan: Plan, scale: float
):
    # The last tiles see most: they begin first.
    tile, split, b = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    start, length, heads = start_ref[b], lengths_ref[b], jnp.int32(plan.heads)
    row = tile * plan.tile + jax.lax.broadcasted_iota(jnp.int32, (plan.tile,), 0)
    query = jax.lax.div(row, heads)
    valid = query < length
    position = start + query
    # A tile without a valid query sees nothing.
    first_query, last_query = (jax.lax.div(tile * plan.tile + r, heads) for r in (0, plan.tile - 1))
    behind = jnp.minimum(start + jnp.minimum(last_query + 1, length), plan.capacity)
    seen = jnp.where(first_query < length, behind, 0)
    share = rows_a_split(seen, plan)
    first, end = split * share, jnp.minimum((split + 1) * share, seen)

    def queries(columns: Columns) -> jax.Array:
        return q_ref[b, jnp.minimum(row, plan.num_rows - 1), columns].astype(plan.work)

    cuts = pieces(0, plan.rank)
    value_slots = [pl.ds(first, count) for first, count in cuts]
    slots = value_slots + [pl.ds(first, count) for first, count in pieces(plan.rank, plan.channels)]
    held = [queries(slot) for slot in slots] if plan.holds_queries else []

    def step(j, carry):
        top, total, mixed = carry
        key = j * plan.keys + jax.lax.broadcasted_iota(jnp.int32, (plan.keys,), 0)
        at = _place(table_ref, b, j, key, plan)

        def latents(columns: Columns) -> jax.Array:
            """Rows of the pool; those that no query of the tile sees are zeros, whatever lies there."""
            live = (key < seen)[:, None]
            if isinstance(at, jax.Array):  # interpret mode has no masked loads of scattered rows
                return jnp.where(live, pool_ref[at, columns].astype(plan.work), 0)
            return pltriton.load(pool_ref.at[at, columns], mask=live, other=0.0).astype(plan.work)

        if plan.holds_queries:
            rows = [latents(slot) for slot in slots]
            scores = functools.reduce(jnp.add, (_product(q, k, plan, t=True) for q, k in zip(held, rows)))
            values = rows[: len(value_slots)]
        else:
            scores = _scores_by_slices(queries, latents, plan)
            values = [latents(slot) for slot in value_slots]
        scores = jnp.where(key <= position[:, None], scores * scale, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, fade = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        total = total * fade + jnp.sum(weights, axis=1)
        weights = weights.astype(plan.work)
        mixed = [m * fade[:, None] + _product(weights, v, plan) for m, v in zip(mixed, values)]
        return new_top, total, mixed

    @pl.when((split == 0) | (first < end))
    def _():
        zeros = [jnp.zeros((plan.tile, count), jnp.float32) for _, count in cuts]
        empty = jnp.full((plan.tile,), -jnp.inf, jnp.float32), jnp.zeros((plan.tile,), jnp.float32), zeros
        begin, stop = (jax.lax.div(x + plan.keys - 1, jnp.int32(plan.keys)) for x in (first, end))
        top, total, mixed = jax.lax.fori_loop(begin, stop, step, empty)
        mine, ours = pl.ds(tile * plan.tile, plan.tile), row < plan.num_rows
        for slot, m in zip(value_slots, mixed):
            mean = jnp.where(valid[:, None], m / total[:, None], 0.0).astype(means_ref.dtype)
            pltriton.store(means_ref.at[b, split, mine, slot], mean, mask=ours[:, None])
        pltriton.store(norms_ref.at[b, split, mine], top + jnp.log2(total), mask=ours)


def _place(table_ref, b: jax.Array, j: jax.Array, key: jax.Array, plan: Plan) -> Columns | jax.Array:
    """Where in the pool the rows `key` of key block j lie."""
    page = jnp.int32(plan.page)
    if plan.lie_together:
        first = j * plan.keys
        return pl.ds(table_ref[b, jax.lax.div(first, page)] * page + jax.lax.rem(first, page), plan.keys)
    key = jnp.minimum(key, plan.capacity - 1)
    return table_ref[b, jax.lax.div(key, page)] * page + jax.lax.rem(key, page)


def _scores_by_slices(queries: Read, latents: Read, plan: Plan) -> jax.Array:
    """Scores [tile, keys] a slice of channels at a time; unrolled, the loop would spill."""

    def add(s, scores):
        columns = pl.ds(s * CHANNELS, CHANNELS)
        return scores + _product(queries(columns), latents(columns), plan, t=True)

    zeros = jnp.zeros((plan.tile, plan.keys), jnp.float32)
    return jax.lax.fori_loop(0, plan.channels // CHANNELS, add, zeros)


def _product(a: jax.Array, b: jax.Array, plan: Plan, *, t: bool = False) -> jax.Array:
    """a @ b, or a @ b^T, summed in float32."""
    axes = ((1,), (1,)) if t else ((1,), (0,))
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=plan.precision, preferred_element_type=jnp.float32
    )
