"""A call's tokens as chunks of 64 rows, which the kernels' grids run over in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.kda.grid import MIN_LOG_DECAY
from pallas_kernels.kda.pallas import Sequence
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.table import Table, make_table, whole_rows
from pallas_kernels.kda.tpu.chunk import CHUNK
from pallas_kernels.kda.tpu.cost import Work

LANES = 128
"""Channels come in multiples of this."""


class Layout(NamedTuple):
    """The C chunks of N sequences on a batch's token axes.

    Attributes:
        pack, table: the sequences and their chunks.
        rows: [C, L] int32, each row's token; None for whole rows, whose chunks lie side by side.
        own: [C, L] bool, whether there is a token; None as above.
        owner: [C] int32, the sequence of each chunk. Spare chunks belong to the last one and hold no token: they
            hand its state on.
        begins, ends: [C] int32, 1 for the first and for the last chunk of a sequence.
    """

    pack: Pack
    table: Table
    rows: jax.Array | None
    own: jax.Array | None
    owner: jax.Array
    begins: jax.Array
    ends: jax.Array


class Operands(NamedTuple):
    """What both passes read: q, k, g, v [C, L, H * channels], beta float32 [C, H, 1, L]."""

    q: jax.Array
    k: jax.Array
    g: jax.Array
    v: jax.Array
    beta: jax.Array


def lay_out(pack: Pack | None, batch: int, tokens: int) -> Layout:
    """The layout of sequences on `batch` x `tokens` rows; None are whole rows."""
    if pack is None:
        whole = whole_rows(batch, tokens)
        owner = np.repeat(np.arange(batch, dtype=np.int32), _chunks(tokens))
        turns = (owner[1:] != owner[:-1]).astype(np.int32)
        begins, ends = np.append(np.int32(1), turns), np.append(turns, np.int32(1))
        owner, begins, ends = map(jnp.asarray, (owner, begins, ends))
        return Layout(whole, make_table(whole, batch * tokens, CHUNK), None, None, owner, begins, ends)
    table = make_table(pack, batch * tokens, CHUNK)
    number, inside = (jnp.arange(size, dtype=jnp.int32) for size in (table.token.shape[0], CHUNK))
    owner = jnp.searchsorted(table.first[1:-1], number, side="right").astype(jnp.int32)
    owner = jnp.minimum(owner, pack.first.shape[0] - 1)
    turns, one = (owner[1:] != owner[:-1]).astype(jnp.int32), jnp.ones((1,), jnp.int32)
    begins, ends = jnp.concatenate([one, turns]), jnp.concatenate([turns, one])
    rows, own = table.token[:, None] + inside, inside < table.live[:, None]
    return Layout(pack, table, rows, own, owner, begins, ends)


def operands(x: Sequence, layout: Layout) -> Operands:
    """A call's arrays, chunk by chunk."""
    keys, values = wide(x.q.shape[3]), wide(x.v.shape[3])
    beta = split(x.beta.astype(jnp.float32)[..., None], layout, 1)
    q, k, g = (split(each, layout, keys) for each in (x.q, x.k, x.g))
    return Operands(q, k, g, split(x.v, layout, values), jnp.moveaxis(beta, 2, 1)[:, :, None])


def work_of(x: Operands, states: jax.Array) -> Work:
    """For the costs."""
    sequences, heads, keys, values = states.shape
    return Work(x.q.shape[0], sequences, heads, keys, values, x.v.dtype.itemsize)


def specs(keys: int, values: int, chunk_at: Callable[[Any], Any]) -> tuple[pl.BlockSpec, ...]:
    """The blocks of `Operands` in a grid over heads and chunks, whose step c holds chunk `chunk_at(c)`."""

    def rows(channels: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, CHUNK, channels), lambda h, c, *_: (chunk_at(c), 0, h))

    beta = pl.BlockSpec((1, 1, 1, CHUNK), lambda h, c, *_: (chunk_at(c), h, 0, 0))
    return rows(keys), rows(keys), rows(keys), rows(values), beta


def load(k_ref, g_ref, v_ref, beta_ref) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """k, g, v [L, C] and beta [1, L] of a chunk of a head in float32, inside a kernel."""
    k, g, v = (ref[0].astype(jnp.float32) for ref in (k_ref, g_ref, v_ref))
    return k, jnp.maximum(g, MIN_LOG_DECAY), v, beta_ref[0, 0]


def split(x: jax.Array, layout: Layout, channels: int) -> jax.Array:
    """[B, T, H, C] as [chunks, L, H * channels]: zeros behind a head's channels and where there is no token."""
    batch, tokens, heads, have = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, channels - have))) if channels > have else x
    if layout.rows is None or layout.own is None:
        missing = _chunks(tokens) * CHUNK - tokens
        x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x
        return x.reshape(-1, CHUNK, heads * channels)
    x = x.reshape(batch * tokens, -1)
    x = x.at[jnp.minimum(layout.rows, batch * tokens - 1)].get(mode="clip")
    return jnp.where(layout.own[..., None], x, jnp.zeros((), x.dtype))


def join(chunks: jax.Array, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `split`, to [B, T, H, C]; zeros for tokens of no sequence."""
    batch, tokens, heads, have = shape
    if layout.rows is None or layout.own is None:
        x = chunks.reshape(batch, -1, heads, chunks.shape[2] // heads)
        return x[:, :tokens, :, :have]
    place = jnp.where(layout.own, layout.rows, batch * tokens).reshape(-1)  # whoever is nobody's is dropped
    x = chunks.reshape(place.shape[0], heads, -1)[..., :have]
    return jnp.zeros((batch * tokens, heads, have), x.dtype).at[place].set(x, mode="drop").reshape(shape)


def widen(states: jax.Array) -> jax.Array:
    """States [N, H, K, V] with zeros behind their channels."""
    keys, values = states.shape[2:]
    return jnp.pad(states, ((0, 0), (0, 0), (0, wide(keys) - keys), (0, wide(values) - values)))


def wide(size: int) -> int:
    """Channels with those that fill up the lanes."""
    return -(-size // LANES) * LANES


def check_chunk(chunk: int | None) -> None:
    """Raises ValueError unless a call's chunk is the one there is."""
    if chunk not in (None, CHUNK):
        raise ValueError(
            f"kda_prefill: the backend 'tpu' has chunks of {CHUNK} tokens, got chunk_size={chunk}"
        )


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)
