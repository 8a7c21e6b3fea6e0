"""The chunks of a call: which tokens each holds, how they are read from the inputs and written to the output.

Two layouts share this: the *grid* (a batch of whole rows that advance together) and the *pack* (sequences one after the
other on a flat token axis, each with its own chunk grid anchored at its token 0).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.reference import Pack

MIN_LOG_DECAY = -1e4
"""exp of it is 0 in float32; keeps -inf out of sums and products, where 0 * inf would be NaN."""


class Inputs(NamedTuple):
    q: jax.Array  # [B, T, H, K]
    k: jax.Array  # [B, T, H, K]
    v: jax.Array  # [B, T, H, V]
    g: jax.Array  # [B, T, H, K]
    beta: jax.Array  # [B, T, H]


class Form(NamedTuple):
    """The static choices of a call."""

    chunk: int  # tokens a chunk
    group: int  # chunks whose matrices are made together
    bounded: bool
    scale: float  # of q; the output is scaled instead, where it is written anyway


class Row(NamedTuple):
    """One sequence of a pack: its rows on the flat token axis and how far into a chunk it resumes."""

    first: jax.Array
    count: jax.Array
    lead: jax.Array  # start modulo chunk


def row_of(pack: Pack, n: jax.Array | int, form: Form) -> Row:
    """Sequence n of a pack."""
    return Row(pack.first[n], pack.count[n], pack.start[n] % form.chunk)


def num_groups(pack: Pack, form: Form) -> jax.Array:
    """Groups of chunks of each sequence, [N]; an empty sequence has none."""
    span = form.chunk * form.group
    lead = pack.start % form.chunk
    return jnp.where(pack.count > 0, (lead + pack.count + span - 1) // span, 0)


def extent(row: Row, chunk: jax.Array, form: Form) -> tuple[jax.Array, jax.Array]:
    """Token counts of this call at which chunk number `chunk` begins and ends (equal when it is behind the end)."""
    begin = jnp.clip(chunk * form.chunk - row.lead, 0, row.count)
    return begin, jnp.clip((chunk + 1) * form.chunk - row.lead, 0, row.count)


def load(inputs: Inputs, row: Row | None, group: jax.Array, form: Form) -> Inputs:
    """The inputs of one group of chunks, [group, B*H, L, ...]; rows of no token are zeros, which change nothing."""
    loaded = Inputs(*(read(x, row, group, form) for x in inputs))
    return loaded._replace(g=jnp.maximum(loaded.g, MIN_LOG_DECAY))


def read(x: jax.Array, row: Row | None, group: jax.Array, form: Form) -> jax.Array:
    """One input's rows of a group of chunks, [group, B*H, L, ...]."""
    # Batch and heads become one axis: XLA's CPU compiler of JAX 0.10.2 makes programs that crash from products with
    # an axis of size one among their batch axes.
    if row is None:
        block = _slice(x, group * (form.group * form.chunk), form.group * form.chunk)
        block = block.reshape(x.shape[0], form.group, form.chunk, *x.shape[2:])
        block = jnp.moveaxis(block, (1, 3), (0, 2))
        return block.reshape(form.group, x.shape[0] * x.shape[2], form.chunk, *x.shape[3:])
    chunks = []
    for p in range(form.group):
        begin, end = extent(row, group * form.group + p, form)
        # Rows behind the last token are that token again, and dead: no copy of x with room behind it is needed.
        rows = jnp.minimum(row.first + begin + jnp.arange(form.chunk), x.shape[1] - 1)
        chunk = x[0].at[rows].get(mode="promise_in_bounds", indices_are_sorted=True)
        chunk = jnp.moveaxis(chunk, 1, 0)  # [H, L, ...]
        live = (jnp.arange(form.chunk) < end - begin).reshape(-1, *[1] * (x.ndim - 3))
        chunks.append(jnp.where(live, chunk, 0.0))
    return jnp.stack(chunks)


def _slice(x: jax.Array, at: jax.Array, length: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, at, length, axis=1)


def store(
    whole: jax.Array, parts: jax.Array, row: Row | None, group: jax.Array, form: Form, *, rising: bool = False
) -> jax.Array:
    """Writes a group's rows [group, B*H, L, ...] back.

    Rows behind a chunk's end keep what stands there. Who writes the chunks of all sequences in `rising` order need not
    read that: those rows become zeros until their own chunk comes.
    """
    if row is None:
        block = parts.reshape(form.group, whole.shape[0], whole.shape[2], form.chunk, *parts.shape[3:])
        block = jnp.moveaxis(block, (0, 2), (1, 3))
        block = block.reshape(block.shape[0], form.group * form.chunk, *block.shape[3:])
        return jax.lax.dynamic_update_slice_in_dim(whole, block, group * (form.group * form.chunk), axis=1)
    for p in range(form.group):
        begin, end = extent(row, group * form.group + p, form)
        at = row.first + begin
        block = jnp.moveaxis(parts[p], 0, 1)[None]
        live = (jnp.arange(form.chunk) < end - begin).reshape(-1, *[1] * (block.ndim - 2))
        block = jnp.where(live, block, 0.0 if rising else _slice(whole, at, form.chunk))
        whole = jax.lax.dynamic_update_slice_in_dim(whole, block, at, axis=1)
    return whole


def room(x: jax.Array, pack: Pack | None, form: Form) -> tuple[int, ...]:
    """The shape of x with room for its last chunk to be written whole."""
    tokens = x.shape[1] + (form.chunk if pack is not None else -x.shape[1] % (form.chunk * form.group))
    return x.shape[0], tokens, *x.shape[2:]


def pad(x: jax.Array, pack: Pack | None, form: Form) -> jax.Array:
    """A grid's input with room for its last chunk to be read whole; a pack's needs none."""
    extra = 0 if pack is not None else room(x, pack, form)[1] - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)) if extra else x
