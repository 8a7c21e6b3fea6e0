"""One token a row: the state is read once and written once, where it lies.

A TPU writes every block of an output back when the grid leaves it. So a row of padding stays at the block of a live
row beside it, which is neither fetched nor left for its sake, and touches nothing there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu.cost import step_cost

MOST_HEADS = 8
"""Heads of a block: 2 x 2 blocks of eight states of 128 x 128 take 2 MiB of the core's memory."""

PADDING, LIVE, KEEP = range(3)


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array | None,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Backend "tpu" of `kda_step`.

    Args:
        q, k [B, H, K]; v [B, H, V]; g float32 [B, H, K]; beta [B, H].
        pool: float32 [S, H, K, V]; it is written in place.
        slots: [B] int32, each row's place in the pool; a negative one reads and writes nothing. None: row b at b.

    Returns:
        out [B, H, V] float32, zeros where there is no slot, and the pool.
    """
    batch, heads, keys = q.shape
    values = v.shape[-1]
    slots = jnp.arange(batch, dtype=jnp.int32) if slots is None else slots
    some = next(size for size in range(MOST_HEADS, 0, -1) if heads % size == 0)
    blocks = heads // some
    vectors = jnp.stack(
        [x.reshape(batch, blocks, some, keys) for x in (k, beta[..., None] * k, q, jnp.exp(g))], 2
    )
    place, kind = plan(slots)

    def rows(count: int, channels: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, count, channels), lambda h, b, *_: (b, h, 0, 0))

    state = pl.BlockSpec((1, some, keys, values), lambda h, b, place, *_: (place[b], h, 0, 0))
    out, pool = pl.pallas_call(
        functools.partial(_body, some=some),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks, batch),
            in_specs=[rows(4 * some, keys), rows(some, values), state],
            out_specs=[rows(some, values), state],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, blocks, some, values), jnp.float32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={4: 1},
        cost_estimate=step_cost(batch, heads, keys, values),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="kda_step",
    )(
        place,
        kind,
        vectors.reshape(batch, blocks, 4 * some, keys),
        v.reshape(batch, blocks, some, values),
        pool,
    )
    return out.reshape(v.shape), pool


def plan(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each row the place whose block it stays at, and what it does there.

    Padding stays where the last live row before it is, or else the first one behind it. Without a live row the first
    of all writes back what it read, and the others stay with it.
    """
    number, live = jnp.arange(slots.shape[0], dtype=jnp.int32), slots >= 0
    before = jax.lax.cummax(jnp.where(live, number, -1))
    place = slots[jnp.where(before < 0, jnp.argmax(live).astype(jnp.int32), before)]
    keep = (number == 0) & ~jnp.any(live)
    kind = jnp.where(live, LIVE, jnp.where(keep, KEEP, PADDING)).astype(jnp.int32)
    return jnp.maximum(place, 0), kind


def _body(place_ref, kind_ref, vectors_ref, v_ref, pool_ref, out_ref, new_ref, *, some: int):
    kind = kind_ref[pl.program_id(1)]

    @pl.when(kind == LIVE)
    def _():
        columns = vectors_ref[0, 0].T  # [K, 4 H], a channel a row, as the state has them
        for h in range(some):
            k, writing, q, decay = (columns[:, i * some + h][:, None] for i in range(4))
            state = decay * pool_ref[0, h]
            error = v_ref[0, 0, pl.ds(h, 1)] - jnp.sum(k * state, axis=0, keepdims=True)
            state = state + writing * error
            new_ref[0, h] = state
            out_ref[0, 0, pl.ds(h, 1)] = jnp.sum(q * state, axis=0, keepdims=True)

    @pl.when(kind != LIVE)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(kind == KEEP)
    def _():
        new_ref[...] = pool_ref[...]
