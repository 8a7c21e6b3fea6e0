"""The forward's state pass again, for what the gradients need of it: each chunk's first state, and what it adds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.table import Table
from pallas_kernels.kda.triton.backward.cost import states_cost
from pallas_kernels.kda.triton.backward.trace import Held, Stored
from pallas_kernels.kda.triton.intra import Matrices
from pallas_kernels.kda.triton.tile import Plan, product, read, rows_of


def trace_states(
    v: jax.Array,
    beta: jax.Array,
    matrices: Matrices,
    states: jax.Array,
    table: Table,
    plan: Plan,
) -> tuple[jax.Array, jax.Array]:
    """The state that each chunk meets, [C, H, K, V], and u, [C, H, L, V], float32. Chunks without tokens are not
    written.

    Args:
        v: [tokens, H * V]; beta: float32 [tokens, H].
        matrices: as `intra` makes them.
        states: float32 [N, H, K, V], what the sequences have absorbed.
    """
    sequences, chunks = states.shape[0], matrices.decay.shape[0]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    tile = pl.BlockSpec((1, 1, plan.keys, plan.value_tile), lambda j, n, h: (n, h, 0, j))
    before = jax.ShapeDtypeStruct((chunks, *states.shape[1:]), jnp.float32)
    u = jax.ShapeDtypeStruct((chunks, plan.heads, plan.chunk, plan.values), jnp.float32)
    arrays = (*table, v, beta, matrices.inverse, matrices.kw, matrices.ke, matrices.decay)
    before, u = pl.pallas_call(
        functools.partial(_body, plan=plan),
        grid=(plan.values // plan.value_tile, sequences, plan.heads),
        in_specs=[whole] * len(arrays) + [tile],
        out_specs=[whole, whole],
        out_shape=[before, u],
        cost_estimate=states_cost(plan, chunks, sequences, v.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8 if plan.holds_state else 4, num_stages=1),
        interpret=plan.interpret,
        name="kda_states",
    )(*arrays, states)
    return before, u


def _body(
    token_ref, live_ref, first_ref, v_ref, beta_ref, inverse_ref, kw_ref, ke_ref, decay_ref, states_ref,
    before_ref, u_ref, *, plan: Plan,
):  # fmt: skip
    j, n, h = (pl.program_id(axis) for axis in range(3))
    length = plan.chunk
    rows = rows_of(0, length)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (0, 1))
    mine = pl.ds(j * plan.value_tile, plan.value_tile)
    columns = pl.ds(h * plan.values + j * plan.value_tile, plan.value_tile)
    first, end = first_ref[n], first_ref[n + 1]
    state = (Held if plan.holds_state else Stored)(before_ref, None, decay_ref, h, mine, plan)

    def chunk(c, carried):
        state.keep(c, carried)
        token, live = token_ref[c], live_ref[c]
        at = jnp.minimum(token + rows, plan.num_tokens - 1)
        beta = jnp.where(rows < live, beta_ref[at, h], 0.0)[:, None]
        v = read(v_ref, token, live, rows, plan, columns)
        inverse = jnp.where(row >= column, inverse_ref[c, h], 0.0)
        u = product(inverse, beta * (v - state.seen_by(kw_ref, c, carried)), plan, fine=True)
        u_ref[c, h, :, mine] = u
        return state.step(c, c + 1, c + 1 == end, carried, [(ke_ref, u, 1.0)])

    jax.lax.fori_loop(first, end, chunk, state.begin(states_ref, first, first == end))
