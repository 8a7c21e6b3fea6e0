"""Backend "tpu": latent attention as one Pallas kernel for TPUs (Mosaic), for many queries and for one.

A program is a tile of queries with their heads and a block of latent rows. The grid's last axis runs over the blocks in
order, and what is summed stays in the core's memory from one to the next. A block is brought in by pieces of a page.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS = 64
"""Latent rows fetched in one piece: a page is a whole number of them."""

PIECES = 4
"""Of a block of keys."""

TILE = 256
"""Most (query, head) pairs a program."""


class Plan(NamedTuple):
    """The static sizes of a call."""

    heads: int
    num_rows: int  # T * H
    tile: int  # (query, head) pairs a program
    rank: int
    page: int  # rows of a page; a contiguous buffer is one page a sequence
    pages: int  # of a sequence
    work: jnp.dtype  # of the operands of products

    @property
    def pieces_a_page(self) -> int:
        return -(-self.page // ROWS)

    @property
    def blocks(self) -> int:
        """Of keys, in a sequence."""
        return -(-self.pages * self.pieces_a_page // PIECES)


def make_plan(
    q: jax.ShapeDtypeStruct | jax.Array,
    latents: jax.ShapeDtypeStruct | jax.Array,
    pages: int,
    rank: int,
) -> Plan:
    """The plan for q [B, T, H, C] and a pool of latents [num_pages, page_size, C], `pages` of them a sequence."""
    _, tokens, heads, _ = q.shape
    half = q.dtype == jnp.bfloat16 and latents.dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    return Plan(
        heads=heads,
        num_rows=tokens * heads,
        tile=TILE if tokens > 1 else -(-heads // 16) * 16,
        rank=rank,
        page=latents.shape[1],
        pages=pages,
        work=jnp.dtype(jnp.bfloat16 if half else jnp.float32),
    )


def refusal(latents: jax.Array, page_table: jax.Array | None) -> str | None:
    """Why the kernel cannot do a call, or None."""
    if page_table is not None and latents.shape[1] % ROWS:
        return f"takes pages of a multiple of {ROWS} rows, got {latents.shape[1]}"
    return None


def forward(
    q: jax.Array,
    latents: jax.Array,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    *,
    rank: int,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """A `pallas.Forward`."""
    batch, tokens, heads, channels = q.shape
    if page_table is None:
        page_table = jnp.arange(batch, dtype=jnp.int32)[:, None]
    plan = make_plan(q, latents, page_table.shape[1], rank)
    query = (jnp.arange(plan.num_rows, dtype=jnp.int32) // heads)[:, None]
    rows = q.reshape(batch, plan.num_rows, channels)
    out = _call(start, lengths, page_table, query, rows, latents, plan, scale, interpret)
    return out.reshape(batch, tokens, heads, rank)


def _call(
    start: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    query: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    plan: Plan,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """The kernel: [B, T * H, R] in q's dtype, out of `query` [T * H, 1], the number of each row's query."""
    batch, _, channels = q.shape

    def piece(n: int) -> pl.BlockSpec:
        def place(b, i, j, start_ref, lengths_ref, table_ref):
            # Behind the last row that anyone sees nothing new is fetched.
            last = jax.lax.div(_seen(i, b, start_ref, lengths_ref, plan) + ROWS - 1, jnp.int32(ROWS)) - 1
            number = jnp.maximum(jnp.minimum(j * PIECES + n, last), 0)
            page = jax.lax.div(number, jnp.int32(plan.pieces_a_page))
            return table_ref[b, page], number - page * plan.pieces_a_page, 0

        return pl.BlockSpec((1, ROWS, channels), place)

    def tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, plan.tile, width), lambda b, i, j, *_: (b, i, 0))

    return pl.pallas_call(
        functools.partial(_body, plan=plan, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, -(-plan.num_rows // plan.tile), plan.blocks),
            in_specs=[
                pl.BlockSpec((plan.tile, 1), lambda b, i, j, *_: (i, 0)),
                tile(channels),
                *(piece(n) for n in range(PIECES)),
            ],
            out_specs=tile(plan.rank),
            scratch_shapes=[
                pltpu.VMEM((plan.tile, 1), jnp.float32),
                pltpu.VMEM((plan.tile, 1), jnp.float32),
                pltpu.VMEM((plan.tile, plan.rank), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, plan.num_rows, plan.rank), q.dtype),
        cost_estimate=cost(plan, batch, channels, q.dtype, pool.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="mla_attend",
    )(start, lengths, page_table, query, q, *(pool for _ in range(PIECES)))


def cost(plan: Plan, batch: int, channels: int, queries: jnp.dtype, latents: jnp.dtype) -> pl.CostEstimate:
    """What a call does by count, as if every sequence were written to the end of its capacity."""
    capacity, tokens = plan.pages * plan.page, plan.num_rows // plan.heads
    pairs = batch * plan.heads * (tokens * capacity - tokens * (tokens - 1) // 2)
    rows = batch * plan.num_rows
    return pl.CostEstimate(
        flops=2 * pairs * (channels + plan.rank),
        transcendentals=pairs,
        bytes_accessed=batch * capacity * channels * latents.itemsize
        + rows * (channels + plan.rank) * queries.itemsize,
    )


def _seen(i, b, start_ref, lengths_ref, plan: Plan) -> jax.Array:
    """Rows of sequence b that a query of tile i sees: rows 0 .., and none when no query counts."""
    heads = jnp.int32(plan.heads)
    first, last = (jax.lax.div(i * plan.tile + r, heads) for r in (0, plan.tile - 1))
    behind = start_ref[b] + jnp.minimum(last + 1, lengths_ref[b])
    return jnp.where(first < lengths_ref[b], jnp.minimum(behind, plan.pages * plan.page), 0)


def _body(start_ref, lengths_ref, table_ref, query_ref, q_ref, *refs, plan: Plan, scale: float):
    *piece_refs, out_ref, top_ref, total_ref, mixed_ref = refs
    b, i, j = (pl.program_id(axis) for axis in range(3))
    seen, size = _seen(i, b, start_ref, lengths_ref, plan), PIECES * ROWS

    @pl.when(j == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        total_ref[...] = jnp.zeros_like(total_ref)
        mixed_ref[...] = jnp.zeros_like(mixed_ref)

    @pl.when(j * size < seen)
    def _():
        row = j * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        pieces = [ref[0].astype(jnp.float32) for ref in piece_refs]
        # Rows that no query of the tile sees are zeros, whatever lies there.
        keys = jnp.where(row < seen, jnp.concatenate(pieces), 0.0).astype(plan.work)
        scores = _dot(q_ref[0].astype(plan.work), keys, plan, t=True) * scale
        key = j * size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(key <= start_ref[b] + query_ref[...], scores, -jnp.inf)
        top = jnp.maximum(top_ref[...], jnp.max(scores, axis=1, keepdims=True))
        weights, fade = jnp.exp(scores - top), jnp.exp(top_ref[...] - top)
        top_ref[...] = top
        total_ref[...] = total_ref[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
        mixed_ref[...] = mixed_ref[...] * fade + _dot(weights.astype(plan.work), keys[:, : plan.rank], plan)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        valid = query_ref[...] < lengths_ref[b]
        out_ref[0] = jnp.where(valid, mixed_ref[...] / total_ref[...], 0.0).astype(out_ref.dtype)


def _dot(a: jax.Array, b: jax.Array, plan: Plan, *, t: bool = False) -> jax.Array:
    """a @ b, or a @ b^T, summed in float32; float32 is multiplied in full."""
    axes = ((1,), (1,)) if t else ((1,), (0,))
    precision = None if plan.work == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
