"""The inverse of a chunk's unit lower matrix, by substitution: in a diagonal block row by row, then block by block."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.triton.tile import BLOCK, Plan, meet, product


def part(i, j) -> tuple:
    """Where block (i, j) of a chunk's [1, 1, L, L] stands."""
    return 0, 0, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)


def invert_block(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower a [16, 16]."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    diagonal = jnp.where(row == column, 1.0, 0.0)

    def substitute(r, inverse):
        factors = jnp.sum(jnp.where(row == r, a, 0.0), axis=0)  # row r of a
        new = jnp.sum(jnp.where(row == r, diagonal, 0.0), axis=0) - jnp.sum(
            factors[:, None] * inverse, axis=0
        )
        return jnp.where(row == r, new[None, :], inverse)

    return jax.lax.fori_loop(1, BLOCK, substitute, diagonal)


def invert_row(ref, i: jax.Array, diagonal: jax.Array, plan: Plan) -> None:
    """Turns row i of a matrix's blocks into the inverse's, in place, where all rows above are the inverse's already.

    Args:
        ref: [1, 1, L, L]; row i holds the matrix's blocks left of the diagonal, and the inverse's on it.
        diagonal: that block, float32.
    """
    multiply = functools.partial(product, plan=plan, fine=True)

    def invert(j, carry):
        def add(m, sums):
            left, above = (ref[part(*at)].astype(jnp.float32) for at in ((i, m), (m, j)))
            return sums + multiply(left, above)

        sums = jax.lax.fori_loop(j, i, add, jnp.zeros((BLOCK, BLOCK), jnp.float32))
        block = -multiply(diagonal, sums)
        meet(plan)  # this block was read, and no later one needs it
        ref[part(i, j)] = block.astype(ref.dtype)
        return carry

    meet(plan)
    jax.lax.fori_loop(0, i, invert, jnp.int32(0))
