"""The gradient of a chunk's matrices with respect to q, k and g: `chunk_matrices` backwards, level by level."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.chunk import (
    BOUNDED_ROWS,
    Chunk,
    Level,
    apart,
    both,
    halves,
    lower_ones,
    product,
    quotients,
)


def chunk_gradient(
    q: jax.Array, k: jax.Array, g: jax.Array, levels: list[Level], d: Chunk, bounded: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pulls the cotangents of a chunk's matrices back to q, k and g, each [..., L, K].

    Args:
        q, k, g: what `chunk_matrices` was given.
        levels: what it returned beside the chunk.
        d: the cotangents; those of `pairs` are zero where `pairs` is.
        bounded: as there.
    """
    size = BOUNDED_ROWS if bounded else 1
    # Of blocks, the only one of which is the chunk.
    d = Chunk(
        d.reads[..., None, :, :, :], d.ke[..., None, :, :], d.decay[..., None, :], d.pairs[..., None, :, :, :]
    )
    for level in reversed(levels):
        d = _pull_apart(level, d)
    q, k, g = (x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1]) for x in (q, k, g))
    parts = _blocks_of_many(q, k, g, d) if bounded else _blocks_of_one(q, k, g, d)
    dq, dk, dg = (x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]) for x in parts)
    return dq, dk, dg


def _pull_apart(level: Level, d: Chunk) -> Chunk:
    """From the cotangents of joined blocks [..., N, ...] to those of their halves [..., 2 N, ...]."""
    size = level.ke.shape[-2]
    (_, reads1), (ke0, _), (total0, total1) = halves(level)
    corner = both(d.pairs[..., size:, :size])
    first, second = d.reads[..., :size, :], d.reads[..., size:, :]
    dtotal0 = d.decay * total1 + jnp.sum(second * reads1, axis=(-3, -2))
    dtotal1 = d.decay * total0 + jnp.sum(d.ke[..., :size, :] * ke0, axis=-2)
    second = second * total0[..., None, None, :] + apart(product(corner, ke0))
    dke0 = d.ke[..., :size, :] * total1[..., None, :] + product(jnp.swapaxes(corner, -1, -2), both(reads1))
    return Chunk(
        _interleave(first, second, 4),
        _interleave(dke0, d.ke[..., size:, :], 3),
        _interleave(dtotal0, dtotal1, 2),
        _interleave(d.pairs[..., :size, :size], d.pairs[..., size:, size:], 4),
    )


def _interleave(even: jax.Array, odd: jax.Array, axes: int) -> jax.Array:
    """Even and odd blocks in turn on the block axis, `axes` from the end."""
    block = even.ndim - axes
    x = jnp.stack([even, odd], axis=block + 1)
    return x.reshape(*x.shape[:block], -1, *x.shape[block + 2 :])


def _blocks_of_one(q, k, g, d: Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
    decay, diagonal = jnp.exp(g), d.pairs[..., 1, :, :]
    dreads_k, dreads_q = (d.reads[..., i, :, :] * decay for i in (0, 1))
    dq = dreads_q + diagonal * k
    dk = dreads_k + d.ke + diagonal * q
    return dq, dk, k * dreads_k + q * dreads_q + decay * d.decay[..., None, :]


def _blocks_of_many(q, k, g, d: Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The decay of row r is in everything that r reads and in nothing that r's key gives to later rows."""
    size = g.shape[-2]
    head, tail, forth, back = quotients(g)
    diagonal = jnp.diagonal(d.pairs[..., 1, :, :], axis1=-2, axis2=-1)[..., None]
    below = both(jnp.where(jnp.tril(jnp.ones((size, size), bool), -1), d.pairs, 0.0))
    rows = jnp.stack([k, q], axis=-3)
    drows = apart(product(below, k * back)) * forth[..., None, :, :] + d.reads * head[..., None, :, :]
    at_end = d.ke * tail
    dkeys = at_end + back * product(jnp.swapaxes(below, -1, -2), both(rows * forth[..., None, :, :]))
    through = jnp.sum(drows * rows, axis=-3) - k * dkeys
    whole = jnp.sum(k * at_end, axis=-2) + d.decay * head[..., -1, :]
    dg = product(jnp.broadcast_to(lower_ones(size, g.dtype).T, (*g.shape[:-1], size)), through)
    dk, dq = drows[..., 0, :, :] + dkeys + diagonal * q, drows[..., 1, :, :] + diagonal * k
    return dq, dk, dg + whole[..., None, :]
