"""What sums over value channels: the gradients of a chunk's matrices."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.table import Table
from pallas_kernels.kda.triton.backward.cost import contract_cost
from pallas_kernels.kda.triton.tile import BLOCK, Plan, product, read, rows_of


class Gradients(NamedTuple):
    """The gradients of C chunks' `Matrices`. In [C, H, L, L], blocks of 16 above the diagonal are not written."""

    writes: jax.Array  # [C, H, L, L] float32: of A, strictly lower
    pairs: jax.Array  # [C, H, L, L] float32, lower
    kw: jax.Array  # [C, H, L, K] in plan.work: for every unit of beta
    qe: jax.Array  # [C, H, L, K] in plan.work
    ke: jax.Array  # [C, H, L, K] in plan.work
    decay: jax.Array  # [C, H, K] float32


def contract(
    v: jax.Array,
    d_out: jax.Array,
    beta: jax.Array,
    u: jax.Array,
    d_write: jax.Array,
    before: jax.Array,
    after: jax.Array,
    table: Table,
    plan: Plan,
    scale: float,
) -> tuple[Gradients, jax.Array, jax.Array]:
    """The matrices' gradients, that of v [tokens, H * V] in v.dtype, and beta's by way of v, float32 [tokens, H]; rows
    of no chunk are not written.

    Args:
        v, d_out: [tokens, H * V]; beta: float32 [tokens, H].
        u, before: as `trace_states` makes them.
        d_write, after: as `retreat` makes them.
        scale: multiplied the output.
    """
    chunks, heads, length, keys = before.shape[0], plan.heads, plan.chunk, plan.keys
    whole = pl.BlockSpec(memory_space=pl.ANY)
    wide = pl.BlockSpec((1, 1, length, keys), lambda c, h: (c, h, 0, 0))
    # A masked row behind the end is not stored; interpret mode moves a slice that reaches there.
    rows = plan.num_tokens + (length if plan.interpret else 0)
    arrays = (table.token, table.live, v, d_out, beta, u, d_write, before, after)
    *gradients, d_v, d_beta = pl.pallas_call(
        functools.partial(_body, plan=plan, scale=scale),
        grid=(chunks, heads),
        in_specs=[whole] * len(arrays),
        out_specs=[
            whole,
            whole,
            wide,
            wide,
            wide,
            pl.BlockSpec((1, 1, keys), lambda c, h: (c, h, 0)),
            whole,
            whole,
        ],
        out_shape=[
            *[jax.ShapeDtypeStruct((chunks, heads, length, length), jnp.float32)] * 2,
            *[jax.ShapeDtypeStruct((chunks, heads, length, keys), plan.work)] * 3,
            jax.ShapeDtypeStruct((chunks, heads, keys), jnp.float32),
            jax.ShapeDtypeStruct((rows, heads * plan.values), v.dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ],
        cost_estimate=contract_cost(plan, chunks, v.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=plan.interpret,
        name="kda_contract",
    )(*arrays)
    return Gradients(*gradients), d_v[: plan.num_tokens], d_beta[: plan.num_tokens]


def _body(
    token_ref, live_ref, v_ref, d_out_ref, beta_ref, u_ref, d_write_ref, before_ref, after_ref, writes_ref, pairs_ref,
    kw_ref, qe_ref, ke_ref, decay_ref, d_v_ref, d_beta_ref, *, plan: Plan, scale: float,
):  # fmt: skip
    c, h = (pl.program_id(axis) for axis in range(2))
    length = plan.chunk
    token, live = token_ref[c], live_ref[c]
    rows = rows_of(0, length)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (0, 1))
    at = jnp.minimum(token + rows, plan.num_tokens - 1)
    beta = jnp.where(rows < live, beta_ref[at, h], 0.0)
    here = pl.ds(token, length)
    tiles = plan.values // plan.value_tile

    def columns(s):
        return pl.ds(h * plan.values + s * plan.value_tile, plan.value_tile)

    def slot(s):
        return pl.ds(s * plan.value_tile, plan.value_tile)

    def outputs(s):
        return read(d_out_ref, token, live, rows, plan, columns(s))

    def sum_writes(s, carry):
        writes, d_beta = carry
        d_write = d_write_ref[c, h, :, slot(s)]
        v = read(v_ref, token, live, rows, plan, columns(s))
        d_v = (beta[:, None] * d_write).astype(d_v_ref.dtype)
        pltriton.store(d_v_ref.at[here, columns(s)], d_v, mask=(rows < live)[:, None])
        writes = writes - product(d_write, u_ref[c, h, :, slot(s)], plan, t=True)
        return writes, d_beta + jnp.sum(d_write * v, axis=1)

    def sum_pairs(s, pairs):
        return pairs + product(outputs(s), u_ref[c, h, :, slot(s)], plan, t=True)

    # One loop for both squares would spill on sm_80.
    zero, written = jnp.zeros((length, length), jnp.float32), (row | (BLOCK - 1)) >= column
    writes, d_beta = jax.lax.fori_loop(0, tiles, sum_writes, (zero, jnp.zeros((length,), jnp.float32)))
    pltriton.store(d_beta_ref.at[here, h], d_beta, mask=rows < live)
    pltriton.store(writes_ref.at[c, h], jnp.where(row > column, writes, 0.0), mask=written)
    pairs = jax.lax.fori_loop(0, tiles, sum_pairs, zero)
    pltriton.store(pairs_ref.at[c, h], jnp.where(row >= column, scale * pairs, 0.0), mask=written)

    def slice_of(k, carry):
        keys = pl.ds(k * plan.key_slice, plan.key_slice)

        def add(s, carry):
            kw, qe, ke, decay = carry
            before, after = before_ref[c, h, keys, slot(s)], after_ref[c, h, keys, slot(s)]
            qe = qe + product(outputs(s), before, plan, t=True)
            kw = kw - product(d_write_ref[c, h, :, slot(s)], before, plan, t=True)
            ke = ke + product(u_ref[c, h, :, slot(s)], after, plan, t=True)
            return kw, qe, ke, decay + jnp.sum(before * after, axis=1)

        zero, none = (
            jnp.zeros(shape, jnp.float32) for shape in ((length, plan.key_slice), (plan.key_slice,))
        )
        kw, qe, ke, decay = jax.lax.fori_loop(0, tiles, add, (zero, zero, zero, none))
        for ref, x in ((kw_ref, kw), (qe_ref, scale * qe), (ke_ref, ke)):
            ref[0, 0, :, keys] = x.astype(ref.dtype)
        decay_ref[0, 0, keys] = decay
        return carry

    jax.lax.fori_loop(0, plan.keys // plan.key_slice, slice_of, jnp.int32(0))
