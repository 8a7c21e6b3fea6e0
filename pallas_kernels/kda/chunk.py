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

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 16
"""Rows whose inverse is found by substitution; larger blocks are merged by products."""

SHIFT = 40.0
"""In the bounded form exp(-sum g) <= e^80 over BLOCK rows; both factors are moved by e^40 to stay in range."""


class Chunk(NamedTuple):
    """What a chunk does to any state; leading axes [..., L, ...] are the caller's."""

    kw: jax.Array  # [..., L, K]
    qe: jax.Array  # [..., L, K]
    ke: jax.Array  # [..., L, K]
    decay: jax.Array  # [..., K]
    akk: jax.Array  # [..., L, L], strictly lower, without beta
    aqk: jax.Array  # [..., L, L], lower


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y over the last two axes, in full float32 everywhere."""
    return jnp.matmul(x, y, precision="highest")


def product_t(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y^T over the last two axes."""
    return product(x, jnp.swapaxes(y, -1, -2))


def chunk_matrices(q: jax.Array, k: jax.Array, g: jax.Array, bounded: bool) -> Chunk:
    """Builds a chunk's matrices from q (scaled), k and g, each [..., L, K] with L a multiple of 16."""
    *lead, length, channels = q.shape
    size = BLOCK if bounded else 4
    blocks = (*lead, length // size, size, channels)
    q, k = q.reshape(blocks), k.reshape(blocks)
    if bounded:
        sums = jnp.einsum("rc,...cd->...rd", jnp.tril(jnp.ones((size, size), jnp.float32)), g.reshape(blocks), precision="highest")
        head = jnp.exp(sums)
        inverse = 1.0 / head
        tail = head[..., -1:, :] * inverse
        left, right = k * (inverse * jnp.exp(-SHIFT)), head * jnp.exp(SHIFT)
        akk = product_t(k * right, left)
        aqk = product_t(q * right, left)
        akk, aqk = _strictly_lower(akk), _strictly_lower(aqk) + _diagonal(q, k)
    else:
        head, tail, akk, aqk = _four(q, k, jnp.exp(g.reshape(blocks)))
    total = head[..., -1, :]  # [..., blocks, K]
    kw, qe, ke = k * head, q * head, k * tail
    while size < length:
        # Pairs of blocks become one: the later rows meet the earlier ones across the border between them.
        pair = lambda x: x.reshape(*lead, x.shape[len(lead)] // 2, 2, *x.shape[len(lead) + 1 :])  # noqa: E731
        kw, qe, ke, total, akk, aqk = map(pair, (kw, qe, ke, total, akk, aqk))
        a, b = (..., 0, slice(None), slice(None)), (..., 1, slice(None), slice(None))
        first, last = total[..., 0, None, :], total[..., 1, None, :]
        akk = _join(akk[a], product_t(kw[b], ke[a]), akk[b])
        aqk = _join(aqk[a], product_t(qe[b], ke[a]), aqk[b])
        kw = jnp.concatenate([kw[a], kw[b] * first], axis=-2)
        qe = jnp.concatenate([qe[a], qe[b] * first], axis=-2)
        ke = jnp.concatenate([ke[a] * last, ke[b]], axis=-2)
        total = total[..., 0, :] * total[..., 1, :]
        size *= 2
    squeeze = lambda x: jnp.squeeze(x, len(lead))  # noqa: E731
    return Chunk(*map(squeeze, (kw, qe, ke, total, akk, aqk)))


def _four(q, k, e):
    """Blocks of four rows by the definition: each pair's decay is a product of at most three factors."""
    e0, e1, e2, e3 = (e[..., i, :] for i in range(4))
    e01, e12, e23 = e0 * e1, e1 * e2, e2 * e3
    one = jnp.ones_like(e0)
    head = jnp.stack([e0, e01, e01 * e2, e01 * e23], axis=-2)
    tail = jnp.stack([e1 * e23, e23, e3, one], axis=-2)
    between = {(1, 0): e1, (2, 1): e2, (3, 2): e3, (2, 0): e12, (3, 1): e23, (3, 0): e1 * e23}

    def pairs(x, diagonal):
        zero = jnp.zeros(x.shape[:-2], x.dtype)
        rows = [
            [
                jnp.sum(x[..., r, :] * k[..., c, :] * between[r, c], axis=-1)
                if r > c
                else (jnp.sum(x[..., r, :] * k[..., r, :], axis=-1) if r == c and diagonal else zero)
                for c in range(4)
            ]
            for r in range(4)
        ]
        return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)

    return head, tail, pairs(k, False), pairs(q, True)


def _join(upper, corner, lower):
    """[[upper, 0], [corner, lower]] of square blocks."""
    return jnp.concatenate(
        [
            jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
            jnp.concatenate([corner, lower], axis=-1),
        ],
        axis=-2,
    )


def _strictly_lower(x):
    size = x.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((size, size), bool), -1), x, 0.0)


def _diagonal(q, k):
    size = q.shape[-2]
    return jnp.eye(size, dtype=q.dtype) * jnp.sum(q * k, axis=-1)[..., None]


def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower a [..., L, L]: substitution in blocks of 16 rows, products to merge them."""
    *lead, length, _ = a.shape
    count = length // BLOCK
    grid = a.reshape(*lead, count, BLOCK, count, BLOCK)
    own = jnp.stack([grid[..., i, :, i, :] for i in range(count)], axis=len(lead))
    rows = [jnp.broadcast_to(jnp.eye(BLOCK, dtype=a.dtype)[0], (*own.shape[:-2], BLOCK))]
    for i in range(1, BLOCK):
        known = jnp.stack(rows, axis=-2)
        rows.append(jnp.eye(BLOCK, dtype=a.dtype)[i] - jnp.sum(own[..., i, :i, None] * known, axis=-2))
    inverse, size = jnp.stack(rows, axis=-2), BLOCK
    while size < length:
        pairs = length // (2 * size)
        grid = a.reshape(*lead, pairs, 2, size, pairs, 2, size)
        corner = jnp.stack([grid[..., i, 1, :, i, 0, :] for i in range(pairs)], axis=len(lead))
        both = inverse.reshape(*lead, pairs, 2, size, size)
        early, late = both[..., 0, :, :], both[..., 1, :, :]
        inverse = _join(early, -product(product(late, corner), early), late)
        size *= 2
    return inverse[..., 0, :, :]
