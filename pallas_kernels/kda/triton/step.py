"""One token a row: the state is read once and written once, where it lies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.triton.cost import step_cost

VALUE_TILE = 32
KEY_SLICE = 128


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
    """Backend "triton" of `kda_step`.

    Args:
        q, k [B, H, K]; v [B, H, V]; g float32 [B, H, K]; beta [B, H].
        pool: float32 [S, H, K, V]; it is written in place.
        slots: [B] int32, each row's place in the pool; a negative one reads and writes nothing. None: row b at b.

    Returns:
        out [B, H, V] float32, zeros where there is no slot, and the pool.
    """
    batch, heads, keys = q.shape
    slots = jnp.arange(batch, dtype=jnp.int32) if slots is None else slots
    values = v.shape[-1]
    slice_size, tile = (min(size & -size, most) for size, most in ((keys, KEY_SLICE), (values, VALUE_TILE)))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_body, slice_size=slice_size, tile=tile, interpret=interpret),
        grid=(values // tile, batch, heads),
        in_specs=[whole] * 7,
        out_specs=[pl.BlockSpec((1, 1, tile), lambda j, b, h: (b, h, j)), whole],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, values), jnp.float32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={6: 1},
        cost_estimate=step_cost(batch, heads, keys, values),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="kda_step",
    )(slots, q, k, v, g, beta, pool)


def _body(
    slots_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, pool_ref, out_ref, new_ref, *, slice_size: int, tile: int,
    interpret: bool,
):  # fmt: skip
    j, b, h = (pl.program_id(axis) for axis in range(3))
    slot, columns, keys = slots_ref[b], pl.ds(j * tile, tile), q_ref.shape[2]
    beta, v = beta_ref[b, h].astype(jnp.float32), v_ref[b, h, columns].astype(jnp.float32)
    zero = jnp.zeros((tile,), jnp.float32)

    def row(ref, at) -> jax.Array:
        return ref[b, h, at].astype(jnp.float32)[:, None]

    def decayed(at) -> jax.Array:
        return jnp.exp(row(g_ref, at)) * pool_ref[slot, h, at, columns]

    def write(at, state, error, out) -> jax.Array:
        state = state + row(k_ref, at) * error[None, :]
        if not interpret:  # of a small tile several threads read the same number, and one of them writes it
            pltriton.debug_barrier()
        new_ref[slot, h, at, columns] = state
        return out + jnp.sum(row(q_ref, at) * state, axis=0)

    @pl.when(slot < 0)
    def _():
        out_ref[0, 0] = zero

    @pl.when(slot >= 0)
    def _():
        if slice_size == keys:
            all_keys = pl.ds(0, keys)
            state = decayed(all_keys)
            error = beta * (v - jnp.sum(row(k_ref, all_keys) * state, axis=0))
            out_ref[0, 0] = write(all_keys, state, error, zero)
            return

        def at(s):
            return pl.ds(s * slice_size, slice_size)

        count = keys // slice_size
        seen = jax.lax.fori_loop(
            0, count, lambda s, sums: sums + jnp.sum(row(k_ref, at(s)) * decayed(at(s)), axis=0), zero
        )
        error = beta * (v - seen)
        out_ref[0, 0] = jax.lax.fori_loop(
            0, count, lambda s, out: write(at(s), decayed(at(s)), error, out), zero
        )
