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
    """What a chunk does to any state; leading axes [..., L, ...] are the caller's."""

    kw: jax.Array  # [..., L, K]
    qe: jax.Array  # [..., L, K]
    ke: jax.Array  # [..., L, K]
    decay: jax.Array  # [..., K]
    akk: jax.Array  # [..., L, L], strictly lower, without beta
    aqk: jax.Array  # [..., L, L], lower


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y over the last two axes, in full float32 everywhere."""
    if x.shape[-2] < TINY:
        return functools.reduce(
            jnp.add, (x[..., :, j, None] * y[..., j, None, :] for j in range(y.shape[-2]))
        )
    return jnp.matmul(x, y, precision="highest")


def product_t(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y^T over the last two axes."""
    if x.shape[-2] < TINY:
        return row_dot(*jnp.broadcast_arrays(x[..., :, None, :], y[..., None, :, :]))[..., 0]
    return jnp.matmul(x, jnp.swapaxes(y, -1, -2), precision="highest")


def chunk_matrices(q: jax.Array, k: jax.Array, g: jax.Array, bounded: bool) -> Chunk:
    """Builds a chunk's matrices from q (scaled), k and g, each [..., L, K] with L a power of two from 16.

    Blocks of one row (of 16 rows when `bounded`) become one chunk by joining neighbours: the later block's rows meet
    the earlier block's across the border between them, each decayed to that border and no further.
    """
    *lead, length, channels = q.shape
    size = BOUNDED_ROWS if bounded else 1
    q, k, g = (x.reshape(*lead, length // size, size, channels) for x in (q, k, g))
    aqk = jnp.eye(size, dtype=q.dtype) * row_dot(q, k)
    if bounded:
        sums = jnp.einsum(
            "rc,...cd->...rd", jnp.tril(jnp.ones((size, size), g.dtype)), g, precision="highest"
        )
        head = jnp.exp(sums)
        back = jnp.exp(-sums)  # 1 / head would square an underflowing number in the gradient
        tail = head[..., -1:, :] * back
        forth, back = head * math.exp(SHIFT), k * (back * math.exp(-SHIFT))
        below = jnp.tril(jnp.ones((size, size), bool), -1)
        akk = jnp.where(below, product_t(k * forth, back), 0.0)
        aqk = aqk + jnp.where(below, product_t(q * forth, back), 0.0)
        kw, qe, ke, total = k * head, q * head, k * tail, head[..., -1, :]
    else:
        decay = jnp.exp(g)
        kw, qe, ke, total, akk = k * decay, q * decay, k, decay[..., 0, :], jnp.zeros_like(aqk)
    while size < length:
        (kw0, kw1), (qe0, qe1), (ke0, ke1) = (_neighbours(x, 3) for x in (kw, qe, ke))
        (akk0, akk1), (aqk0, aqk1), (total0, total1) = (
            _neighbours(akk, 3),
            _neighbours(aqk, 3),
            _neighbours(total, 2),
        )
        akk = _join(akk0, product_t(kw1, ke0), akk1)
        aqk = _join(aqk0, product_t(qe1, ke0), aqk1)
        kw = jnp.concatenate([kw0, kw1 * total0[..., None, :]], axis=-2)
        qe = jnp.concatenate([qe0, qe1 * total0[..., None, :]], axis=-2)
        ke = jnp.concatenate([ke0 * total1[..., None, :], ke1], axis=-2)
        total = total0 * total1
        size *= 2
    return Chunk(
        kw[..., 0, :, :],
        qe[..., 0, :, :],
        ke[..., 0, :, :],
        total[..., 0, :],
        akk[..., 0, :, :],
        aqk[..., 0, :, :],
    )


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
    """Splits the block axis, `axes` from the end, into even and odd blocks."""
    block = x.ndim - axes
    x = x.reshape(*x.shape[:block], x.shape[block] // 2, 2, *x.shape[block + 1 :])
    return x[(slice(None),) * (block + 1) + (0,)], x[(slice(None),) * (block + 1) + (1,)]


def _join(upper: jax.Array, corner: jax.Array, lower: jax.Array) -> jax.Array:
    """[[upper, 0], [corner, lower]] of square blocks."""
    above = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
