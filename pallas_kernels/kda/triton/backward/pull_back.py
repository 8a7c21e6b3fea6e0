"""From the gradients of a chunk's matrices to those of q, k, g and beta, a slice of key channels a program.

Every exponent is a sum of log decays, as in `intra`. A decay is in all that passes over it: what the chunk's rows take
from before its row, and what its earlier rows leave behind it. These are sums, block by block; only between rows of the
same block is what later rows give each other taken off again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.table import Table
from pallas_kernels.kda.triton.backward.contract import Gradients
from pallas_kernels.kda.triton.backward.cost import pull_back_cost
from pallas_kernels.kda.triton.tile import BLOCK, Plan, product, rows_of
from pallas_kernels.kda.triton.tokens import Tokens


def pull_back(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, d: Gradients, table: Table, plan: Plan
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k [tokens, H * K] in their dtype, of g float32, and of beta by way of k, float32
    [slices, tokens, H], to be summed; rows of no chunk are not written.

    Args:
        q, k: [tokens, H * K]; g: float32 [tokens, H * K]; beta: float32 [tokens, H].
        d: as `contract` makes them.
    """
    chunks, slices = table.token.shape[0], plan.keys // plan.key_slice
    whole = pl.BlockSpec(memory_space=pl.ANY)
    # A masked row behind the end is not stored; interpret mode moves a slice that reaches there.
    rows = plan.num_tokens + (plan.chunk if plan.interpret else 0)
    arrays = (table.token, table.live, q, k, g, beta, *d)
    wide = (rows, plan.heads * plan.keys)
    d_q, d_k, d_g, d_beta = pl.pallas_call(
        functools.partial(_body, plan=plan),
        grid=(chunks, plan.heads, slices),
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * 4,
        out_shape=[
            jax.ShapeDtypeStruct(wide, q.dtype),
            jax.ShapeDtypeStruct(wide, k.dtype),
            jax.ShapeDtypeStruct(wide, jnp.float32),
            jax.ShapeDtypeStruct((slices, rows, plan.heads), jnp.float32),
        ],
        cost_estimate=pull_back_cost(plan, chunks, q.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=plan.interpret,
        name="kda_pull_back",
    )(*arrays)
    tokens = plan.num_tokens
    return d_q[:tokens], d_k[:tokens], d_g[:tokens], d_beta[:, :tokens]


def _body(
    token_ref, live_ref, q_ref, k_ref, g_ref, beta_ref, writes_ref, pairs_ref, kw_ref, qe_ref, ke_ref, decay_ref,
    d_q_ref, d_k_ref, d_g_ref, d_beta_ref, *, plan: Plan,
):  # fmt: skip
    c, h, s = (pl.program_id(axis) for axis in range(3))
    token, live = token_ref[c], live_ref[c]
    blocks, size = plan.chunk // BLOCK, plan.key_slice
    x = Tokens((q_ref, k_ref, g_ref), token, live, h, plan)
    columns, slot = pl.ds(h * plan.keys + s * size, size), pl.ds(s * size, size)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    one_row = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
    block = jax.lax.broadcasted_iota(jnp.int32, (blocks, 1), 0)
    multiply = functools.partial(product, plan=plan, fine=True)
    lower, before, from_here = (
        jnp.where(mask, 1.0, 0.0) for mask in (row >= column, row > column, row <= column)
    )
    behind = jnp.where(row < column, 1.0, 0.0)
    zero, none = jnp.zeros((BLOCK, size), jnp.float32), jnp.zeros((size,), jnp.float32)

    def decays(b):
        return x.log2_decays(rows_of(b), s)

    def span(first, last):
        """The log decay of whole blocks from `first` up to `last`, [slice]."""
        return jax.lax.fori_loop(first, last, lambda m, sums: sums + jnp.sum(decays(m), axis=0), none)

    def strength(b):
        at = jnp.minimum(token + rows_of(b), plan.num_tokens - 1)
        return jnp.where(rows_of(b) < live, beta_ref[at, h], 0.0)[:, None]

    def tail(b, last):
        """The decay from each row of a block to the begin of block `last`."""
        return jnp.exp2(multiply(behind, decays(b)) + span(b + 1, last)[None, :])

    def square(ref, i, j):
        return ref[c, h, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)]

    def part(ref, b):
        return ref[c, h, pl.ds(b * BLOCK, BLOCK), slot].astype(jnp.float32)

    def given(b, crossing):
        """What the rows of a block leave to the chunk's end crosses the later blocks."""
        k = x.keys(rows_of(b), s)
        left = jnp.sum(k * tail(b, blocks) * part(ke_ref, b), axis=0)
        return crossing + jnp.where(block > b, left[None, :], 0.0)

    whole = jnp.exp2(span(0, blocks)) * decay_ref[c, h, slot]
    crossing = jnp.zeros((blocks, size), jnp.float32) + whole[None, :]
    crossing = jax.lax.fori_loop(0, blocks, given, crossing)

    def from_last(t, crossing):
        b = blocks - 1 - t
        mine = rows_of(b)
        q, k = x.queries(mine, s), x.keys(mine, s)
        beta, g = strength(b), decays(b)
        head = jnp.exp2(multiply(lower, g))

        def earlier(t, carry):
            """Rows take from an earlier block."""
            from_q, from_k, between, crossing = carry
            j = b - 1 - t
            g = decays(j)
            key = x.keys(rows_of(j), s)
            key = key * jnp.exp2(multiply(behind, g) + between[None, :])
            new_q, new_k = multiply(square(pairs_ref, b, j), key), multiply(square(writes_ref, b, j), key)
            taken = jnp.sum(head * (q * new_q + beta * k * new_k), axis=0)
            crossing = crossing + jnp.where((block > j) & (block < b), taken[None, :], 0.0)
            return from_q + new_q, from_k + new_k, between + jnp.sum(g, axis=0), crossing

        from_q, from_k, to_begin, crossing = jax.lax.fori_loop(0, b, earlier, (zero, zero, none, crossing))

        def later(i, carry):
            """Keys give to a later block."""
            to_keys, between = carry
            g = decays(i)
            decay = jnp.exp2(multiply(lower, g) + between[None, :])
            query, key = x.queries(rows_of(i), s) * decay, x.keys(rows_of(i), s) * decay
            to_keys = to_keys + multiply(square(pairs_ref, i, b).T, query)
            to_keys = to_keys + multiply(square(writes_ref, i, b).T, strength(i) * key)
            return to_keys, between + jnp.sum(g, axis=0)

        to_keys, to_end = jax.lax.fori_loop(b + 1, blocks, later, (zero, none))
        tail_here = jnp.exp2(multiply(behind, g))
        begin, end = jnp.exp2(to_begin)[None, :], jnp.exp2(to_end)[None, :]
        state_q, state_k = (head * begin * part(ref, b) for ref in (qe_ref, kw_ref))
        taken = jnp.sum(q * state_q + beta * k * state_k, axis=0)
        crossing = crossing + jnp.where(block < b, taken[None, :], 0.0)
        from_q, from_k = head * from_q + state_q, head * from_k + state_k
        to_keys = tail_here * (to_keys + end * part(ke_ref, b))
        passed = multiply(before, k * to_keys)
        taken = q * from_q + beta * k * from_k

        pairs, writes = square(pairs_ref, b, b), square(writes_ref, b, b)

        def inside(t, carry):
            """The block with itself, as `intra` walks it; the diagonal, which no decay is in, left out."""
            decayed, in_q, in_k, in_keys = carry
            j = BLOCK - 1 - t
            next_g = x.log2_decays(b * BLOCK + j + 1, s)
            decayed = decayed + jnp.where(one_row > j, next_g[None, :], 0.0)
            key = x.keys(b * BLOCK + j, s)
            decay = jnp.exp2(jnp.where(one_row > j, decayed, -jnp.inf))
            pair, write = (jnp.sum(jnp.where(column == j, y, 0.0), axis=1)[:, None] for y in (pairs, writes))
            in_keys = in_keys + jnp.where(
                one_row == j, jnp.sum(decay * (pair * q + write * beta * k), axis=0)[None, :], 0.0
            )
            seen = decay * key[None, :]
            return decayed, in_q + pair * seen, in_k + write * seen, in_keys

        _, in_q, in_k, in_keys = jax.lax.fori_loop(0, BLOCK, inside, (zero, zero, zero, zero))
        inner = q * in_q + beta * k * in_k - k * in_keys
        diagonal = jnp.sum(jnp.where(row == column, pairs, 0.0), axis=1)[:, None]
        from_k = from_k + in_k
        over = jnp.sum(jnp.where(block == b, crossing, 0.0), axis=0)
        here, mask = pl.ds(token + b * BLOCK, BLOCK), (mine < live)[:, None]
        for ref, d in (
            (d_q_ref, from_q + in_q + diagonal * k),
            (d_k_ref, beta * from_k + to_keys + in_keys + diagonal * q),
            (d_g_ref, multiply(from_here, taken + inner) + passed + over[None, :]),
        ):
            pltriton.store(ref.at[here, columns], d.astype(ref.dtype), mask=mask)
        pltriton.store(d_beta_ref.at[s, here, h], jnp.sum(k * from_k, axis=1), mask=mine < live)
        return crossing

    jax.lax.fori_loop(0, blocks, from_last, crossing)
