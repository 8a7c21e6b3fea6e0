"""The gradient of the state from chunk to chunk, from a sequence's last to its first."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.table import Table
from pallas_kernels.kda.triton.backward.cost import retreat_cost
from pallas_kernels.kda.triton.backward.trace import Held, Stored
from pallas_kernels.kda.triton.intra import Matrices
from pallas_kernels.kda.triton.tile import Plan, product, read, rows_of


def retreat(
    d_out: jax.Array,
    beta: jax.Array,
    matrices: Matrices,
    d_finals: jax.Array,
    table: Table,
    plan: Plan,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of the state that each chunk leaves, [C, H, K, V], of beta (v - kw S), [C, H, L, V], and of the
    states, [N, H, K, V], all float32. Chunks without tokens are not written.

    Args:
        d_out: [tokens, H * V]; beta: float32 [tokens, H].
        matrices: as `intra` makes them.
        d_finals: float32 [N, H, K, V].
        scale: multiplied the output.
    """
    sequences, chunks = d_finals.shape[0], matrices.decay.shape[0]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    tile = pl.BlockSpec((1, 1, plan.keys, plan.value_tile), lambda j, n, h: (n, h, 0, j))
    d_write = jax.ShapeDtypeStruct((chunks, plan.heads, plan.chunk, plan.values), jnp.float32)
    arrays = (*table, d_out, beta, *matrices)
    after, d_write, d_states = pl.pallas_call(
        functools.partial(_body, plan=plan, scale=scale),
        grid=(plan.values // plan.value_tile, sequences, plan.heads),
        in_specs=[whole] * len(arrays) + [tile],
        out_specs=[whole, whole, tile],
        out_shape=[
            jax.ShapeDtypeStruct((chunks, *d_finals.shape[1:]), jnp.float32),
            d_write,
            jax.ShapeDtypeStruct(d_finals.shape, jnp.float32),
        ],
        cost_estimate=retreat_cost(plan, chunks, sequences, d_out.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8 if plan.holds_state else 4, num_stages=1),
        interpret=plan.interpret,
        name="kda_retreat",
    )(*arrays, d_finals)
    return after, d_write, d_states


def _body(
    token_ref, live_ref, first_ref, d_out_ref, beta_ref, inverse_ref, pairs_ref, kw_ref, qe_ref, ke_ref, decay_ref,
    d_finals_ref, after_ref, d_write_ref, d_states_ref, *, plan: Plan, scale: float,
):  # fmt: skip
    j, n, h = (pl.program_id(axis) for axis in range(3))
    length = plan.chunk
    rows = rows_of(0, length)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (0, 1))
    mine = pl.ds(j * plan.value_tile, plan.value_tile)
    columns = pl.ds(h * plan.values + j * plan.value_tile, plan.value_tile)
    first, end = first_ref[n], first_ref[n + 1]
    state = (Held if plan.holds_state else Stored)(after_ref, d_states_ref, decay_ref, h, mine, plan)

    def chunk(t, carried):
        c = end - 1 - t
        state.keep(c, carried)
        token, live = token_ref[c], live_ref[c]
        at = jnp.minimum(token + rows, plan.num_tokens - 1)
        beta = jnp.where(rows < live, beta_ref[at, h], 0.0)[:, None]
        d_out = read(d_out_ref, token, live, rows, plan, columns).astype(plan.work)
        inverse, pairs = (
            jnp.where(row >= column, ref[c, h], jnp.zeros((), ref.dtype)) for ref in (inverse_ref, pairs_ref)
        )
        d_u = scale * product(pairs.T, d_out, plan) + state.seen_by(ke_ref, c, carried)
        d_write = product(inverse.T, d_u, plan, fine=not plan.holds_state)
        d_write_ref[c, h, :, mine] = d_write
        return state.step(
            c, c - 1, c == first, carried, [(qe_ref, d_out, scale), (kw_ref, beta * d_write, -1.0)]
        )

    begun = state.begin(d_finals_ref, end - 1, first == end)
    state.finish(jax.lax.fori_loop(0, end - first, chunk, begun))
