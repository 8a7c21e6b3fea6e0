"""Kernel 1 of 3: what a chunk's tokens do to each other, 16 rows a program.

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

from pallas_kernels.kda.table import Table
from pallas_kernels.kda.triton.cost import intra_cost
from pallas_kernels.kda.triton.tile import (
    BLOCK,
    LOG2_E,
    MIN_LOG2_DECAY,
    Plan,
    product,
    read,
    read_log2_decay,
    read_row,
    rows_of,
)


class Matrices(NamedTuple):
    """What can be known of C chunks before their states arrive (README.md derives them). In [C, H, L, L], blocks of 16
    above the diagonal are not written."""

    writes: (
        jax.Array
    )  # [C, H, L, L] float32: beta k k^T with decays, strictly lower; diagonal blocks (I + block)^-1
    pairs: jax.Array  # [C, H, L, L] in plan.work: q k^T with decays, lower
    kw: jax.Array  # [C, H, L, K] in plan.work: keys seen from the chunk's begin
    qe: jax.Array  # [C, H, L, K] in plan.work: queries seen from there
    ke: jax.Array  # [C, H, L, K] in plan.work: keys seen from the chunk's end
    decay: jax.Array  # [C, H, K] float32: the whole chunk's


def intra(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, table: Table, plan: Plan) -> Matrices:
    """The matrices of all chunks.

    Args:
        q, k: [tokens, H * K]; g: float32 [tokens, H * K]; beta: float32 [tokens, H].
    """
    chunks, heads, length, keys = table.token.shape[0], plan.heads, plan.chunk, plan.keys
    whole = pl.BlockSpec(memory_space=pl.ANY)
    square = pl.BlockSpec((1, 1, BLOCK, length), lambda c, h, i: (c, h, i, 0))
    rows = pl.BlockSpec((1, 1, BLOCK, keys), lambda c, h, i: (c, h, i, 0))
    writes, pairs = (
        jax.ShapeDtypeStruct((chunks, heads, length, length), dtype) for dtype in (jnp.float32, plan.work)
    )
    wide = jax.ShapeDtypeStruct((chunks, heads, length, keys), plan.work)
    outputs = pl.pallas_call(
        functools.partial(_body, plan=plan),
        grid=(chunks, heads, length // BLOCK),
        in_specs=[whole] * 6,
        out_specs=[square, square, rows, rows, rows, pl.BlockSpec((1, 1, keys), lambda c, h, i: (c, h, 0))],
        out_shape=[
            writes,
            pairs,
            wide,
            wide,
            wide,
            jax.ShapeDtypeStruct((chunks, heads, keys), jnp.float32),
        ],
        cost_estimate=intra_cost(plan, chunks, q.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=plan.interpret,
        name="kda_intra",
    )(table.token, table.live, q, k, g, beta)
    return Matrices(*outputs)


def _body(
    token_ref,
    live_ref,
    q_ref,
    k_ref,
    g_ref,
    beta_ref,
    writes_ref,
    pairs_ref,
    kw_ref,
    qe_ref,
    ke_ref,
    decay_ref,
    *,
    plan: Plan,
):
    c, h, i = (pl.program_id(axis) for axis in range(3))
    token, live = token_ref[c], live_ref[c]
    mine = rows_of(i)
    at = jnp.minimum(token + mine, plan.num_tokens - 1)
    beta = jnp.where(mine < live, beta_ref[at, h], 0.0)[:, None]
    slices, blocks = plan.keys // plan.key_slice, plan.chunk // BLOCK
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    lower = jnp.where(row >= column, 1.0, 0.0)
    behind = jnp.where(row < column, 1.0, 0.0)

    def columns(s):
        return pl.ds(h * plan.keys + s * plan.key_slice, plan.key_slice)

    def decays(block, s):
        return read_log2_decay(g_ref, token, live, rows_of(block), plan, columns(s))

    def total(first, last, s):
        """The log decay of whole blocks from `first` up to `last`, [slice]."""
        zero = jnp.zeros((plan.key_slice,), jnp.float32)
        return jax.lax.fori_loop(first, last, lambda m, sums: sums + jnp.sum(decays(m, s), axis=0), zero)

    def inside(s, carry):
        """The block with itself, column by column from its last: E is the log decay from a column to each row."""
        q, k = (read(ref, token, live, mine, plan, columns(s)) for ref in (q_ref, k_ref))
        g = decays(i, s)

        def column_of(t, carry):
            decayed, writes, pairs = carry
            j = BLOCK - 1 - t
            number = i * BLOCK + j
            next_g = jnp.maximum(
                read_row(g_ref, token, live, number + 1, plan, columns(s)) * LOG2_E, MIN_LOG2_DECAY
            )
            rows = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0)
            decayed = decayed + jnp.where(rows > j, next_g[None, :], 0.0)
            key = read_row(k_ref, token, live, number, plan, columns(s))
            seen = jnp.exp2(jnp.where(rows >= j, decayed, -jnp.inf)) * key[None, :]
            here = column == j
            writes = writes + jnp.where(here & (row > column), jnp.sum(k * seen, axis=1)[:, None], 0.0)
            pairs = pairs + jnp.where(here & (row >= column), jnp.sum(q * seen, axis=1)[:, None], 0.0)
            return decayed, writes, pairs

        zero = jnp.zeros((BLOCK, plan.key_slice), jnp.float32)
        decayed, *matrices = jax.lax.fori_loop(0, BLOCK, column_of, (zero, *carry))
        first = jnp.maximum(
            read_row(g_ref, token, live, i * BLOCK, plan, columns(s)) * LOG2_E, MIN_LOG2_DECAY
        )
        head = jnp.exp2(decayed + first[None, :] + total(0, i, s)[None, :])
        tail = jnp.exp2(product(behind, g, plan, fine=True) + total(i + 1, blocks, s)[None, :])
        slot = pl.ds(s * plan.key_slice, plan.key_slice)
        kw_ref[0, 0, :, slot] = (k * head).astype(kw_ref.dtype)
        qe_ref[0, 0, :, slot] = (q * head).astype(qe_ref.dtype)
        ke_ref[0, 0, :, slot] = (k * tail).astype(ke_ref.dtype)
        return tuple(matrices)

    def earlier(j, carry):
        """The block with an earlier one: rows decayed from their block's begin, columns to their block's end and on."""

        def slice_of(s, carry):
            writes, pairs = carry
            q, k = (read(ref, token, live, mine, plan, columns(s)) for ref in (q_ref, k_ref))
            key = read(k_ref, token, live, rows_of(j), plan, columns(s))
            head = jnp.exp2(product(lower, decays(i, s), plan, fine=True))
            key = key * jnp.exp2(product(behind, decays(j, s), plan, fine=True) + total(j + 1, i, s)[None, :])
            return writes + product(k * head, key, plan, fine=True, t=True), pairs + product(
                q * head, key, plan, fine=True, t=True
            )

        zero = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        writes, pairs = jax.lax.fori_loop(0, slices, slice_of, (zero, zero))
        slot = pl.ds(j * BLOCK, BLOCK)
        writes_ref[0, 0, :, slot] = beta * writes
        pairs_ref[0, 0, :, slot] = pairs.astype(pairs_ref.dtype)
        return carry

    zero = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    writes, pairs = jax.lax.fori_loop(0, slices, inside, (zero, zero))
    slot = pl.ds(i * BLOCK, BLOCK)
    writes_ref[0, 0, :, slot] = _unit_lower_inverse(beta * writes)
    pairs_ref[0, 0, :, slot] = pairs.astype(pairs_ref.dtype)
    jax.lax.fori_loop(0, i, earlier, jnp.int32(0))

    @pl.when(i == 0)
    def _():
        def decay(s, carry):
            decay_ref[0, 0, pl.ds(s * plan.key_slice, plan.key_slice)] = jnp.exp2(total(0, blocks, s))
            return carry

        jax.lax.fori_loop(0, slices, decay, jnp.int32(0))


def _unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower a [16, 16], row by row."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    diagonal = jnp.where(row == column, 1.0, 0.0)

    def substitute(r, inverse):
        factors = jnp.sum(jnp.where(row == r, a, 0.0), axis=0)  # row r of a
        new = jnp.sum(jnp.where(row == r, diagonal, 0.0), axis=0) - jnp.sum(
            factors[:, None] * inverse, axis=0
        )
        return jnp.where(row == r, new[None, :], inverse)

    return jax.lax.fori_loop(1, BLOCK, substitute, diagonal)
