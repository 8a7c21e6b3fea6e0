"""Kernel 1 of 2: what a chunk's tokens do to each other, a chunk and value head a program, 16 rows at a time.

Every exponent is a sum of log decays between the two tokens it joins, taken from those decays themselves and never as a
difference of prefix sums: nothing is positive, nothing cancels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.gate import Gate
from pallas_kernels.kda.table import Table
from pallas_kernels.kda.triton.cost import intra_cost
from pallas_kernels.kda.triton.inverse import invert_block, invert_row, part
from pallas_kernels.kda.triton.tile import BLOCK, Plan, meet, product, rows_of
from pallas_kernels.kda.triton.tokens import Tokens


class Matrices(NamedTuple):
    """What can be known of C chunks before their states arrive (README.md derives them). In [C, H, L, L], blocks of 16
    above the diagonal are not written."""

    inverse: jax.Array  # [C, H, L, L] in plan.squares: (I + beta k k^T with decays)^-1, lower
    pairs: jax.Array  # [C, H, L, L] in plan.squares: q k^T with decays, lower
    kw: jax.Array  # [C, H, L, K] in plan.work: keys seen from the chunk's begin
    qe: jax.Array  # [C, H, L, K] in plan.work: queries seen from there
    ke: jax.Array  # [C, H, L, K] in plan.ends: keys seen from the chunk's end
    decay: jax.Array  # [C, H, K] float32: the whole chunk's


def intra(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    table: Table,
    plan: Plan,
    gate: Gate | None = None,
) -> Matrices:
    """The matrices of all chunks.

    Args:
        q, k: [tokens, H * K], divided by their norms on the way in with `plan.qk_l2norm`.
        g: log decays [tokens, HV * K], or with `gate` what it is taken of.
        beta: [tokens, HV].
        gate: A_log [HV] and dt_bias [HV * K].
    """
    chunks, heads, length, keys = table.token.shape[0], plan.heads, plan.chunk, plan.keys
    gates = () if gate is None else (gate.A_log,) if gate.dt_bias is None else (gate.A_log, gate.dt_bias)
    arrays = (table.token, table.live, beta, q, k, g, *gates)
    square = pl.BlockSpec((1, 1, length, length), lambda c, h: (c, h, 0, 0))
    wide = pl.BlockSpec((1, 1, length, keys), lambda c, h: (c, h, 0, 0))
    row = pl.BlockSpec((1, 1, keys), lambda c, h: (c, h, 0))
    shapes = [((length, length), dtype) for dtype in plan.squares]
    shapes += [((length, keys), plan.work)] * 2 + [
        ((length, keys), plan.ends or plan.work),
        ((keys,), jnp.float32),
    ]
    outputs = pl.pallas_call(
        functools.partial(_body, plan=plan),
        grid=(chunks, heads),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=[square, square, wide, wide, wide, row],
        out_shape=[jax.ShapeDtypeStruct((chunks, heads, *shape), dtype) for shape, dtype in shapes],
        cost_estimate=intra_cost(plan, chunks, q.dtype, g.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=plan.interpret,
        name="kda_intra",
    )(*arrays)
    return Matrices(*outputs)


def _body(token_ref, live_ref, beta_ref, *refs, plan: Plan):
    *read, inverse_ref, pairs_ref, kw_ref, qe_ref, ke_ref, decay_ref = refs
    c, h = (pl.program_id(axis) for axis in range(2))
    token, live = token_ref[c], live_ref[c]
    x = Tokens(read, token, live, h, plan)
    blocks = plan.chunk // BLOCK
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    lower = jnp.where(row >= column, 1.0, 0.0)
    behind = jnp.where(row < column, 1.0, 0.0)
    zero = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    multiply = functools.partial(product, plan=plan, fine=True)

    def channels(s):
        return pl.ds(s * plan.key_slice, plan.key_slice)

    def total(first, last, s):
        """The log decay of whole blocks from `first` up to `last`, [slice]."""
        none = jnp.zeros((plan.key_slice,), jnp.float32)
        return jax.lax.fori_loop(
            first, last, lambda m, sums: sums + jnp.sum(x.log2_decays(rows_of(m), s), axis=0), none
        )

    def rows_of_block(i, carry):
        mine = rows_of(i)
        at = jnp.minimum(token + mine, plan.num_tokens - 1)
        beta = jnp.where(mine < live, beta_ref[at, h].astype(jnp.float32), 0.0)[:, None]
        key_norms, query_norms = x.key_norms(i), x.query_norms(i)

        def inside(s, carry):
            """The block with itself, column by column from its last: E is the log decay from a column to each row."""
            k, q, g = (
                x.keys(mine, s) * key_norms[:, None],
                x.queries(mine, s) * query_norms[:, None],
                x.log2_decays(mine, s),
            )

            def column_of(t, carry):
                decayed, writes, pairs = carry
                j = BLOCK - 1 - t
                number = i * BLOCK + j
                rows = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
                decayed = decayed + jnp.where(rows > j, x.log2_decays(number + 1, s)[None, :], 0.0)
                seen = jnp.exp2(jnp.where(rows >= j, decayed, -jnp.inf)) * x.keys(number, s)[None, :]
                here = column == j
                writes = writes + jnp.where(here & (row > column), jnp.sum(k * seen, axis=1)[:, None], 0.0)
                pairs = pairs + jnp.where(here & (row >= column), jnp.sum(q * seen, axis=1)[:, None], 0.0)
                return decayed, writes, pairs

            nothing = jnp.zeros((BLOCK, plan.key_slice), jnp.float32)
            decayed, *matrices = jax.lax.fori_loop(0, BLOCK, column_of, (nothing, *carry))
            # Where the chunk's decay will stand its logarithm grows from block to block.
            before = jnp.where(i > 0, decay_ref[0, 0, channels(s)], 0.0)
            first = x.log2_decays(i * BLOCK, s)
            head = jnp.exp2(decayed + first[None, :] + before[None, :])
            meet(plan)
            decay_ref[0, 0, channels(s)] = before + jnp.sum(g, axis=0)
            tail = jnp.exp2(multiply(behind, g) + total(i + 1, blocks, s)[None, :])
            rows = pl.ds(i * BLOCK, BLOCK)
            kw_ref[0, 0, rows, channels(s)] = (k * head).astype(kw_ref.dtype)
            qe_ref[0, 0, rows, channels(s)] = (q * head).astype(qe_ref.dtype)
            ke_ref[0, 0, rows, channels(s)] = (k * tail).astype(ke_ref.dtype)
            return tuple(matrices)

        def earlier(j, carry):
            """The block with an earlier one: rows decayed from their begin, columns to their end and on."""

            def slice_of(s, carry):
                writes, pairs = carry
                head = jnp.exp2(multiply(lower, x.log2_decays(mine, s)))
                tail = jnp.exp2(multiply(behind, x.log2_decays(rows_of(j), s)) + total(j + 1, i, s)[None, :])
                key = x.keys(rows_of(j), s) * tail
                writes = writes + multiply(x.keys(mine, s) * head, key, t=True)
                return writes, pairs + multiply(x.queries(mine, s) * head, key, t=True)

            writes, pairs = jax.lax.fori_loop(0, plan.slices, slice_of, (zero, zero))
            norms = x.key_norms(j)[None, :]
            inverse_ref[part(i, j)] = (beta * key_norms[:, None] * norms * writes).astype(inverse_ref.dtype)
            pairs_ref[part(i, j)] = (query_norms[:, None] * norms * pairs).astype(pairs_ref.dtype)
            return carry

        jax.lax.fori_loop(0, i, earlier, jnp.int32(0))
        writes, pairs = jax.lax.fori_loop(0, plan.slices, inside, (zero, zero))
        pairs_ref[part(i, i)] = (key_norms[None, :] * pairs).astype(pairs_ref.dtype)
        inverted = invert_block(beta * key_norms[None, :] * writes)
        inverse_ref[part(i, i)] = inverted.astype(inverse_ref.dtype)
        invert_row(inverse_ref, i, inverted, plan)
        return carry

    jax.lax.fori_loop(0, blocks, rows_of_block, jnp.int32(0))

    def decay(s, carry):
        logarithm = decay_ref[0, 0, channels(s)]
        meet(plan)
        decay_ref[0, 0, channels(s)] = jnp.exp2(logarithm)
        return carry

    jax.lax.fori_loop(0, plan.slices, decay, jnp.int32(0))
