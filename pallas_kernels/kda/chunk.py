"""The arithmetic of one chunk: what can be known of it before the state arrives.

A chunk of L tokens acts on the state S it meets through few matrices (README.md derives them):

    u  = inverse @ (beta * (v - kw @ S))      what the tokens write, each knowing the earlier ones' writing
    o  = qe @ S + Aqk @ u
    S' = decay * S + ke^T @ u

kw, qe are keys and queries seen from the chunk's start, ke keys seen from its end. Every exponential here is of a sum
of log decays, so at most 1, and is made by multiplying factors that are at most 1: nothing overflows, nothing
cancels, and what underflows is smaller than the rounding of what it would be added to.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_order import row_dot

BOUNDED_ROWS = 16
"""Rows whose mutual decays may be divided, not multiplied, when no g is below -5: exp(16 * 5) is in range."""

SHIFT = 40.0
"""Half of that exponent: both factors of a quotient are moved by it, so that neither leaves float32."""

TINY = 8
"""Products of fewer rows are written as sums of fixed order: a call into a matrix library costs more than they do."""


class Chunk(NamedTuple):
    """What a chunk does to any state; leading axes [..., L, ...] are the caller's.

    Keys and queries that are treated alike stand in one array, keys first, on an axis of two.
    """

    reads: jax.Array  # [..., 2, L, K]: kw, qe
    ke: jax.Array  # [..., L, K]
    decay: jax.Array  # [..., K]
    pairs: jax.Array  # [..., 2, L, L]: Akk without beta (strictly lower), Aqk (lower)


class Level(NamedTuple):
    """The blocks of one size on the way from rows to a chunk, [..., number of blocks, ...]."""

    reads: jax.Array  # [..., N, 2, size, K]
    ke: jax.Array  # [..., N, size, K]
    total: jax.Array  # [..., N, K], the whole block's decay


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y over the last two axes, in full float32 everywhere."""
    if y.shape[-2] < TINY:
        return functools.reduce(
            jnp.add, (x[..., :, j, None] * y[..., j, None, :] for j in range(y.shape[-2]))
        )
    return jnp.matmul(x, y, precision="highest")


def product_t(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y^T over the last two axes."""
    if y.shape[-2] < TINY:
        return row_dot(*jnp.broadcast_arrays(x[..., :, None, :], y[..., None, :, :]))[..., 0]
    return jnp.matmul(x, jnp.swapaxes(y, -1, -2), precision="highest")


def columns_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x^T @ y over the last two axes."""
    # JAX 0.11's CPU library takes half as long for a transposed copy and its product as for a transposed operand.
    return product(jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2)), y)


def both(x: jax.Array) -> jax.Array:
    """[..., 2, L, C] as the rows [..., 2 L, C] of one product."""
    return x.reshape(*x.shape[:-3], 2 * x.shape[-2], x.shape[-1])


def apart(x: jax.Array) -> jax.Array:
    """The inverse of `both`."""
    return x.reshape(*x.shape[:-2], 2, x.shape[-2] // 2, x.shape[-1])


def chunk_matrices(q: jax.Array, k: jax.Array, g: jax.Array, bounded: bool) -> tuple[Chunk, list[Level]]:
    """Builds a chunk's matrices from q, k and g, each [..., L, K] with L a power of two from 16.

    Blocks of one row (of 16 rows when `bounded`) become one chunk by joining neighbours: the later block's rows meet
    the earlier block's across the border between them, each decayed to that border and no further.

    Returns:
        The chunk, and the levels that were joined, the smallest blocks first: its gradient reads them.
    """
    *lead, length, channels = q.shape
    size = BOUNDED_ROWS if bounded else 1
    q, k, g = (x.reshape(*lead, length // size, size, channels) for x in (q, k, g))
    level, pairs = _blocks_of_many(q, k, g) if bounded else _blocks_of_one(q, k, g)
    levels = []
    while size < length:
        levels.append(level)
        (reads0, reads1), (ke0, ke1), (total0, total1) = halves(level)
        pairs0, pairs1 = _neighbours(pairs, 4)
        pairs = _join(pairs0, apart(product_t(both(reads1), ke0)), pairs1)
        level = Level(
            jnp.concatenate([reads0, reads1 * total0[..., None, None, :]], axis=-2),
            jnp.concatenate([ke0 * total1[..., None, :], ke1], axis=-2),
            total0 * total1,
        )
        size *= 2
    return Chunk(
        level.reads[..., 0, :, :, :], level.ke[..., 0, :, :], level.total[..., 0, :], pairs[..., 0, :, :, :]
    ), levels


def _blocks_of_one(q: jax.Array, k: jax.Array, g: jax.Array) -> tuple[Level, jax.Array]:
    """Blocks of one row, and their pairs [..., N, 2, 1, 1]: a query reads its own token's key undecayed."""
    decay = jnp.exp(g)
    diagonal = row_dot(q, k)
    return Level(jnp.stack([k * decay, q * decay], axis=-3), k, decay[..., 0, :]), jnp.stack(
        [jnp.zeros_like(diagonal), diagonal], axis=-3
    )


class Quotients(NamedTuple):
    """The factors of blocks whose mutual decays are divided: exp(G_r - G_c) = forth_r * back_c."""

    head: jax.Array  # exp(G_r): from the block's first row to r, both included
    tail: jax.Array  # exp(G_last - G_c): behind c to the block's end
    forth: jax.Array
    back: jax.Array


def quotients(g: jax.Array) -> Quotients:
    """The factors for g [..., size, K]."""
    sums = product(jnp.broadcast_to(lower_ones(g.shape[-2], g.dtype), (*g.shape[:-1], g.shape[-2])), g)
    head, back = jnp.exp(sums), jnp.exp(-sums)
    return Quotients(head, head[..., -1:, :] * back, head * math.exp(SHIFT), back * math.exp(-SHIFT))


def lower_ones(size: int, dtype: jnp.dtype) -> jax.Array:
    """[size, size] with ones on and below the diagonal."""
    return jnp.tril(jnp.ones((size, size), dtype))


def _blocks_of_many(q: jax.Array, k: jax.Array, g: jax.Array) -> tuple[Level, jax.Array]:
    size = g.shape[-2]
    head, tail, forth, back = quotients(g)
    rows = jnp.stack([k, q], axis=-3)
    pairs = apart(product_t(both(rows * forth[..., None, :, :]), k * back))
    pairs = jnp.where(jnp.tril(jnp.ones((size, size), bool), -1), pairs, 0.0)
    diagonal = jnp.eye(size, dtype=q.dtype) * row_dot(q, k)
    pairs = pairs + jnp.stack([jnp.zeros_like(diagonal), diagonal], axis=-3)
    return Level(rows * head[..., None, :, :], k * tail, head[..., -1, :]), pairs


def halves(level: Level) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Each array of a level as its even and its odd blocks, which are neighbours."""
    return _neighbours(level.reads, 4), _neighbours(level.ke, 3), _neighbours(level.total, 2)


def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower a [..., L, L], L a power of two: forward substitution by ever larger blocks."""
    *lead, length, _ = a.shape
    inverse, size = jnp.ones((*lead, length, 1, 1), a.dtype), 1
    while size < length:
        pairs = length // (2 * size)
        grid = a.reshape(*lead, pairs, 2, size, pairs, 2, size)[..., :, 1, :, :, 0, :]
        corner = jnp.moveaxis(jnp.diagonal(grid, axis1=-4, axis2=-2), -1, -3)
        early, late = _neighbours(inverse, 3)
        inverse = _join(early, -product(product(late, corner), early), late)
        size *= 2
    return inverse[..., 0, :, :]


def _neighbours(x: jax.Array, axes: int) -> tuple[jax.Array, jax.Array]:
    block = x.ndim - axes
    x = x.reshape(*x.shape[:block], x.shape[block] // 2, 2, *x.shape[block + 1 :])
    return x[(slice(None),) * (block + 1) + (0,)], x[(slice(None),) * (block + 1) + (1,)]


def _join(upper: jax.Array, corner: jax.Array, lower: jax.Array) -> jax.Array:
    """[[upper, 0], [corner, lower]] of square blocks."""
    above = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
