"""The arithmetic of one chunk of a head: 64 rows by all channels, values in float32.

What the derivation does with ever larger blocks is done with masks on squares of 64, because a TPU takes slices of 8
rows and 128 channels and no smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
LEVELS = CHUNK.bit_length() - 1


class Decays(NamedTuple):
    """What lies between the rows of a chunk, all of it at most 1.

    Attributes:
        head: [L, K], from the chunk's begin to a row, both included.
        tail: [L, K], behind a row to the chunk's end.
        levels: for each size of blocks, from 1 row to 32, head and tail with regard to a row's own block.
    """

    head: jax.Array
    tail: jax.Array
    levels: tuple[tuple[jax.Array, jax.Array], ...]


def chunk(
    q: jax.Array, k: jax.Array, g: jax.Array, v: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a chunk reads, [L, V], and the state [K, V] it leaves behind.

    q, k, g [L, K]; v [L, V]; beta [1, L]; state [K, V].
    """
    d = decays(g)
    u = written(k, v, beta, d, state)
    return read(q, k, d, u, state), left(k, g, d.tail, u, state)


def decays(g: jax.Array) -> Decays:
    """Of log decays [L, K]."""
    row, column = _square()

    def within(level: int) -> tuple[jax.Array, jax.Array]:
        same = row >> level == column >> level
        return jnp.exp(_sums(same & (row >= column), g)), jnp.exp(_sums(same & (row < column), g))

    return Decays(*within(LEVELS), tuple(within(level) for level in range(LEVELS)))


def tail(g: jax.Array) -> jax.Array:
    """`Decays.tail` alone."""
    row, column = _square()
    return jnp.exp(_sums(row < column, g))


def written(k: jax.Array, v: jax.Array, beta: jax.Array, d: Decays, state: jax.Array) -> jax.Array:
    """The rows u that the chunk adds to the state, [L, V], each knowing the earlier ones."""
    row, column = _square()
    beta = jnp.sum(jnp.where(row == column, beta, 0.0), axis=1, keepdims=True)  # [L, 1]
    return dot(unit_lower_inverse(beta * _pairs(k, k, d)), beta * (v - dot(k * d.head, state)))


def read(q: jax.Array, k: jax.Array, d: Decays, u: jax.Array, state: jax.Array) -> jax.Array:
    """What the queries read, [L, V]: of the state that the chunk met, and of what was written up to them."""
    row, column = _square()
    own = jnp.where(row == column, jnp.sum(q * k, axis=1, keepdims=True), 0.0)
    return dot(q * d.head, state) + dot(own + _pairs(q, k, d), u)


def left(k: jax.Array, g: jax.Array, tail: jax.Array, u: jax.Array, state: jax.Array) -> jax.Array:
    """The state behind the chunk, [K, V]."""
    whole = dot(g, jnp.ones((CHUNK, state.shape[1]), jnp.float32), over_rows=True)  # alike in every column
    return jnp.exp(whole) * state + dot(k * tail, u, over_rows=True)


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower a: neighbours' inverses at hand, the corner between them is -late a early."""
    row, column = _square()
    inverse = jnp.where(row == column, 1.0, 0.0)
    for level in range(LEVELS):
        inverse -= dot(dot(inverse, jnp.where(_meet(level), a, 0.0)), inverse)
    return inverse


def _inverse_fwd(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_bwd(inverse: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    """-X^T d X^T; what it holds above the diagonal is the caller's to leave out."""
    return (-dot(dot(inverse, d, over_rows=True), inverse, t=True),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)


def dot(a: jax.Array, b: jax.Array, *, over_rows: bool = False, t: bool = False) -> jax.Array:
    """a @ b, a^T @ b, or a @ b^T, in full float32."""
    axes = ((0,), (0,)) if over_rows else ((1,), (1,)) if t else ((1,), (0,))
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _pairs(rows: jax.Array, k: jax.Array, d: Decays) -> jax.Array:
    """rows k^T with decays, strictly lower: a pair of rows meets where its blocks are neighbours, the later row decayed
    from its block's begin, the earlier one to its block's end."""
    pairs = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for level, (head, tail) in enumerate(d.levels):
        pairs += jnp.where(_meet(level), dot(rows * head, k * tail, t=True), 0.0)
    return pairs


def _square() -> tuple[jax.Array, jax.Array]:
    """Row and column of each entry of an L x L matrix."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return row, column


def _meet(level: int) -> jax.Array:
    """Where blocks of 2^level rows have their left neighbour's columns."""
    row, column = _square()
    return (row >> level == (column >> level) + 1) & (row >> (level + 1) == column >> (level + 1))


def _sums(mask: jax.Array, g: jax.Array) -> jax.Array:
    """For each row the sum of those rows of g that its mask names."""
    return dot(jnp.where(mask, 1.0, 0.0), g)
