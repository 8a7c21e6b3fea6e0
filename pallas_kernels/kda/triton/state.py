"""Kernel 2 of 2: the state through the chunks of a sequence, a tile of value channels a program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.table import Marks, Table
from pallas_kernels.kda.triton.cost import state_cost
from pallas_kernels.kda.triton.intra import Matrices
from pallas_kernels.kda.triton.tile import BLOCK, Plan, meet, product, read, rows_of


def advance(
    v: jax.Array,
    beta: jax.Array,
    matrices: Matrices,
    states: jax.Array,
    table: Table,
    marks: Marks,
    plan: Plan,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out [tokens, H * V] in v.dtype (rows of no chunk are not written), the final states [N, H, K, V] float32, and the
    states at the marks [N, NB, H, K, V] (not written where the holder is -1).

    Args:
        v: [tokens, H * V]; beta: [tokens, H].
        matrices: as `intra` makes them.
        states: float32 [N, H, K, V], what the sequences have absorbed.
        scale: multiplies the output.
    """
    sequences, marked = marks.holder.shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    tile = pl.BlockSpec((1, 1, plan.keys, plan.value_tile), lambda j, n, h: (n, h, 0, j))
    tiles = pl.BlockSpec((1, marked, 1, plan.keys, plan.value_tile), lambda j, n, h: (n, 0, h, 0, j))
    # A masked row behind the end is not stored; interpret mode moves a slice that reaches there.
    rows = plan.num_tokens + (plan.chunk if plan.interpret else 0)
    out = jax.ShapeDtypeStruct((rows, plan.heads * plan.values), v.dtype)
    finals = jax.ShapeDtypeStruct(states.shape, jnp.float32)
    at = jax.ShapeDtypeStruct((sequences, marked, *states.shape[1:]), jnp.float32)
    arrays = (*table, *marks, v, beta, *matrices)
    if not marked:  # no kernel takes an array of no elements
        arrays = (*table, table.first, table.first, *arrays[5:])
    out, finals, *at = pl.pallas_call(
        functools.partial(_body, plan=plan, marked=marked, scale=scale),
        grid=(plan.values // plan.value_tile, sequences, plan.heads),
        in_specs=[whole] * len(arrays) + [tile],
        out_specs=[whole, tile, tiles] if marked else [whole, tile],
        out_shape=[out, finals, at] if marked else [out, finals],
        cost_estimate=state_cost(plan, matrices.decay.shape[0], sequences, marked, v.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8 if plan.holds_state else 4, num_stages=1),
        interpret=plan.interpret,
        name="kda_state",
    )(*arrays, states)
    out = out[: plan.num_tokens] if plan.interpret else out
    return out, finals, at[0] if at else jnp.zeros((sequences, 0, *states.shape[1:]), jnp.float32)


def _body(
    token_ref, live_ref, first_ref, holder_ref, ends_ref, v_ref, beta_ref, inverse_ref, pairs_ref, kw_ref, qe_ref,
    ke_ref, decay_ref, states_ref, out_ref, finals_ref, *at_refs, plan: Plan, marked: int, scale: float,
):  # fmt: skip
    j, n, h = (pl.program_id(axis) for axis in range(3))
    length = plan.chunk
    rows = rows_of(0, length)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (0, 1))
    columns = pl.ds(h * plan.values + j * plan.value_tile, plan.value_tile)
    State = _Held if plan.holds_state else _Stored

    def lower(square_ref) -> jax.Array:
        if plan.holds_state:  # what is masked is not fetched; beside a stored state its addresses would spill
            square = pltriton.load(square_ref, mask=row >= column, other=0.0)
        else:
            square = jnp.where(row >= column, square_ref[...], 0.0)
        return square.astype(jnp.float32)

    def chunk(c, carried):
        state = State(carried, finals_ref, decay_ref, ke_ref, h, plan)
        token, live = token_ref[c], live_ref[c]
        at = jnp.minimum(token + rows, plan.num_tokens - 1)
        beta = jnp.where(rows < live, beta_ref[at, h].astype(jnp.float32), 0.0)[:, None]
        v = read(v_ref, token, live, rows, plan, columns)
        inverse, pairs = (lower(ref.at[c, h]) for ref in (inverse_ref, pairs_ref))
        u = product(inverse, beta * (v - state.seen_by(kw_ref, c)), plan)
        out = state.seen_by(qe_ref, c) + product(pairs, u, plan)
        pltriton.store(
            out_ref.at[pl.ds(token, length), columns],
            (out * scale).astype(out_ref.dtype),
            mask=(rows < live)[:, None],
        )

        def snapshot(b, carry):
            @pl.when(holder_ref[n, b] == c)
            def _():
                state.write_after(ends_ref[n, b], u, at_refs[0], (0, b, 0))

            return carry

        if marked:
            jax.lax.fori_loop(0, marked, snapshot, jnp.int32(0))
        return state.next(c, u)

    begin = State.begin(states_ref, finals_ref, plan)
    end = jax.lax.fori_loop(first_ref[n], first_ref[n + 1], chunk, begin)
    State.finish(end, finals_ref)


class _Held:
    """The state's tile in registers."""

    def __init__(self, carried: jax.Array, finals_ref, decay_ref, ke_ref, head, plan: Plan) -> None:
        del finals_ref
        self.state, self.decay_ref, self.ke_ref, self.head, self.plan = carried, decay_ref, ke_ref, head, plan

    @staticmethod
    def begin(states_ref, finals_ref, plan: Plan) -> jax.Array:
        return states_ref[0, 0]

    @staticmethod
    def finish(end: jax.Array, finals_ref) -> None:
        finals_ref[0, 0] = end

    def seen_by(self, rows_ref, c) -> jax.Array:
        return product(rows_ref[c, self.head], self.state.astype(self.plan.work), self.plan)

    def next(self, c, u: jax.Array) -> jax.Array:
        written = product(self.ke_ref[c, self.head].T, u.astype(self.plan.work), self.plan)
        return self.decay_ref[c, self.head][:, None] * self.state + written

    def write_after(self, c, u: jax.Array, ref, place: tuple) -> None:
        ref[(*place, slice(None), slice(None))] = self.next(c, u)


class _Stored:
    """The state's tile in memory, where the final state will stand, a slice of key channels at a time.

    Three passes of TF32 over a tile in registers would spill kilobytes.
    """

    def __init__(self, carried: jax.Array, finals_ref, decay_ref, ke_ref, head, plan: Plan) -> None:
        self.carried, self.ref, self.decay_ref, self.ke_ref = carried, finals_ref, decay_ref, ke_ref
        self.head, self.plan = head, plan

    @staticmethod
    def begin(states_ref, finals_ref, plan: Plan) -> jax.Array:
        def copy(s, carry):
            slot = pl.ds(s * plan.key_slice, plan.key_slice)
            finals_ref[0, 0, slot, :] = states_ref[0, 0, slot, :]
            return carry

        return jax.lax.fori_loop(0, plan.keys // plan.key_slice, copy, jnp.int32(0))

    @staticmethod
    def finish(end: jax.Array, finals_ref) -> None:
        pass

    def slices(self, body, carry):
        """Runs body(slot, carry) for every slice, behind a barrier: the last loop's writes are every thread's."""
        count, size = self.plan.keys // BLOCK, BLOCK
        meet(self.plan)
        return jax.lax.fori_loop(0, count, lambda s, carry: body(pl.ds(s * size, size), carry), carry)

    def seen_by(self, rows_ref, c) -> jax.Array:
        def add(slot, total):
            rows = rows_ref[c, self.head, :, slot].astype(jnp.float32)
            return total + product(rows, self.ref[0, 0, slot, :], self.plan)

        return self.slices(add, jnp.zeros((self.plan.chunk, self.plan.value_tile), jnp.float32))

    def next(self, c, u: jax.Array) -> jax.Array:
        self.write_after(c, u, self.ref, (0, 0))
        return self.carried

    def write_after(self, c, u: jax.Array, ref, place: tuple) -> None:
        def write(slot, carry):
            keys = self.ke_ref[c, self.head, :, slot].astype(jnp.float32)
            written = product(keys.T, u, self.plan)
            decay = self.decay_ref[c, self.head, slot][:, None]
            ref[(*place, slot, slice(None))] = decay * self.ref[0, 0, slot, :] + written
            return carry

        self.slices(write, jnp.int32(0))
