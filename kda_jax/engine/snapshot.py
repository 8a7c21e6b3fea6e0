"""Snapshots: the KDA states of a sequence as one vector over pages, and the rows of its unfinished page of latents.

A snapshot at `position` is named by k + 1 pages, k = `Layout.state_pages`: the vector's, in order, and a copy of the
page of latents that `position` lies in, its dead rows zero. At a multiple of the page's rows there is no such page,
and the last of the k + 1 is page 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kda_jax.engine.memory import Memory


def pack(
    recurrent: Sequence[jax.Array],
    conv: Sequence[jax.Array],
    page_shape: tuple[int, int, int],
    dtype: jnp.dtype,
) -> jax.Array:
    """The states of N sequences as pages.

    Args:
        recurrent: a KDA layer each, float32 [N, HV, K, V].
        conv: a KDA layer each, [N, W-1, C], of no wider dtype than the pool's.
        page_shape: (planes, R, L).
        dtype: the pool's.

    Returns:
        [N, k, planes, R, L]: the bits of the states, the numbers of the windows, and zeros behind them.
    """
    count = conv[0].shape[0]
    bits = [jax.lax.bitcast_convert_type(x.reshape(count, -1), dtype).reshape(count, -1) for x in recurrent]
    vector = jnp.concatenate([*bits, *(x.astype(dtype).reshape(count, -1) for x in conv)], axis=1)
    planes, rows, width = page_shape
    missing = -vector.shape[1] % (planes * rows * width)
    return jnp.pad(vector, ((0, 0), (0, missing))).reshape(count, -1, planes, rows, width)


def unpack(pages: jax.Array, memory: Memory) -> tuple[list[jax.Array], list[jax.Array]]:
    """The recurrent states and windows, each with a row a sequence, of what `pack` made, [N, k, planes, R, L]."""
    count = pages.shape[0]
    vector, at = pages.reshape(count, -1), 0
    recurrent, conv = [], []
    for pool in memory.recurrent:
        parts = 4 // pages.dtype.itemsize
        size = parts * pool[0].size
        bits = vector[:, at : at + size].reshape(count, -1, *([parts] if parts > 1 else []))
        recurrent.append(jax.lax.bitcast_convert_type(bits, jnp.float32).reshape(count, *pool.shape[1:]))
        at += size
    for pool in memory.conv:
        size = pool[0].size
        conv.append(vector[:, at : at + size].astype(pool.dtype).reshape(count, *pool.shape[1:]))
        at += size
    return recurrent, conv


def page_shape(memory: Memory) -> tuple[int, int, int]:
    """(planes, R, L)."""
    _, rows, width = memory.planes[0].shape
    return len(memory.planes), rows, width


def get_pages(memory: Memory, pages: jax.Array) -> jax.Array:
    """[N, planes, R, L] of int32 [N]."""
    return jnp.stack([plane[pages] for plane in memory.planes], axis=1)


def put_pages(memory: Memory, pages: jax.Array, data: jax.Array) -> Memory:
    """The memory with `data` [N, planes, R, L] in the pages int32 [N], none twice but page 0."""
    return memory._replace(
        planes=tuple(plane.at[pages].set(data[:, i]) for i, plane in enumerate(memory.planes))
    )


def save(
    memory: Memory,
    recurrent: Sequence[jax.Array],
    conv: Sequence[jax.Array],
    table: jax.Array,
    position: jax.Array,
    pages: jax.Array,
) -> Memory:
    """Writes snapshots of one sequence at N positions.

    Args:
        memory: the pools.
        recurrent, conv: the states there, [N, ...] a KDA layer.
        table: int32 [n], the sequence's pages.
        position: int32 [N].
        pages: int32 [N, k + 1].
    """
    rows = memory.planes[0].shape[1]
    last = get_pages(memory, table[jnp.minimum(position // rows, table.shape[0] - 1)])
    live = jnp.arange(rows, dtype=jnp.int32) < (position % rows)[:, None]
    last = jnp.where(live[:, None, :, None], last, 0)
    if recurrent:
        state = pack(recurrent, conv, page_shape(memory), last.dtype)
        last = jnp.concatenate([state, last[:, None]], axis=1)
    return put_pages(memory, pages.reshape(-1), last.reshape(-1, *page_shape(memory)))


def load(memory: Memory, slot: jax.Array, pages: jax.Array, last: jax.Array) -> Memory:
    """Writes a snapshot's states into a slot, and its rows of latents into the page `last`.

    Args:
        memory: the pools.
        slot: int32 [].
        pages: int32 [k + 1], as `save` had them.
        last: int32 [], a page of the sequence's own; page 0 when the snapshot has no such rows.
    """
    data = get_pages(memory, pages)
    if memory.recurrent:
        recurrent, conv = unpack(data[None, :-1], memory)
        memory = put_slot(memory, slot, recurrent, conv)
    return put_pages(memory, last[None], data[-1:])


def put_slot(
    memory: Memory, slot: jax.Array, recurrent: Sequence[jax.Array], conv: Sequence[jax.Array]
) -> Memory:
    """The memory with the states of one sequence, [1, ...] a KDA layer, in a slot."""

    def put(pools: Sequence[jax.Array], rows: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(pool, row, slot, axis=0) for pool, row in zip(pools, rows)
        )

    return memory._replace(recurrent=put(memory.recurrent, recurrent), conv=put(memory.conv, conv))
