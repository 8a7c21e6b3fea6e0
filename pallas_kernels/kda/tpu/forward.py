"""The forward pass as one kernel, a chunk of a head at a time.

The grid's last axis runs over the chunks in order, and the state stays in the core's memory from one to the next.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.pallas import Results, Sequence
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.table import Marks, mark
from pallas_kernels.kda.tpu.chunk import CHUNK, decays, left, read, tail, written
from pallas_kernels.kda.tpu.cost import forward_cost
from pallas_kernels.kda.tpu.layout import (
    Layout,
    Operands,
    check_chunk,
    join,
    lay_out,
    load,
    operands,
    specs,
    widen,
    work_of,
)


def forward(
    x: Sequence,
    pack: Pack | None,
    boundaries: jax.Array | None,
    *,
    scale: float,
    chunk: int | None,
    interpret: bool,
) -> Results:
    """A `pallas.Forward`; `chunk` is 64 or None.

    Raises:
        ValueError: another chunk.
    """
    check_chunk(chunk)
    layout = lay_out(pack, *x.q.shape[:2])
    asked = jnp.zeros((x.states.shape[0], 0), jnp.int32) if boundaries is None else boundaries
    extended, marks = mark(layout.table, layout.pack, asked, CHUNK)
    before = extended.live[marks.chunk] if asked.size else marks.chunk
    out, finals, at = _call(
        operands(x, layout), widen(x.states), layout, Marks(marks.holder, before), scale, interpret
    )
    inside = (..., slice(x.states.shape[2]), slice(x.states.shape[3]))
    finals = jnp.where((layout.pack.count > 0)[:, None, None, None], finals[inside], x.states)
    out = join(out, layout, x.v.shape)
    if boundaries is None:
        return out, finals, None
    return out, finals, jnp.where(marks.holder[..., None, None, None] < 0, x.states[:, None], at[inside])


def _call(
    x: Operands, states: jax.Array, layout: Layout, marks: Marks, scale: float, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel; `marks.chunk` holds how many rows of the holder stand before the boundary."""
    sequences, heads, keys, values = states.shape
    chunks, marked = x.q.shape[0], marks.holder.shape[1]
    some = max(marked, 1)  # no array of no elements
    holder, before = (each if marked else jnp.full((sequences, 1), -1, jnp.int32) for each in marks)
    rows = specs(keys, values, lambda c: c)
    *_, out, _ = rows
    state = pl.BlockSpec((1, 1, keys, values), lambda h, c, owner, *_: (owner[c], h, 0, 0))
    return pl.pallas_call(
        functools.partial(_body, scale=scale, marked=marked),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(heads, chunks),
            in_specs=[*rows, state],
            out_specs=[out, state, pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM((keys, values), jnp.float32),
                pltpu.VMEM((keys, values), jnp.float32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
            jax.ShapeDtypeStruct(states.shape, jnp.float32),
            jax.ShapeDtypeStruct((sequences, some, *states.shape[1:]), jnp.float32),
        ],
        cost_estimate=forward_cost(work_of(x, states), marked),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="kda_chunks",
    )(layout.owner, layout.begins, holder, before, *x, states)


def _body(
    owner_ref, begins_ref, holder_ref, before_ref, q_ref, k_ref, g_ref, v_ref, beta_ref, states_ref, out_ref,
    finals_ref, at_ref, state_ref, cut_ref, copied, *, scale: float, marked: int,
):  # fmt: skip
    h, c = (pl.program_id(axis) for axis in range(2))
    n = owner_ref[c]

    @pl.when(begins_ref[c] == 1)
    def _():
        state_ref[...] = states_ref[0, 0]

    q = q_ref[0].astype(jnp.float32)
    k, g, v, beta = load(k_ref, g_ref, v_ref, beta_ref)
    state, d = state_ref[...], decays(g)
    u = written(k, v, beta, d, state)
    out_ref[0] = (read(q, k, d, u, state) * scale).astype(out_ref.dtype)

    def cut(b, _):
        """Writes the state at a boundary out, if it is in this chunk."""

        @pl.when(holder_ref[n, b] == c)
        def _():
            before = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < before_ref[n, b]
            keys, kept = (jnp.where(before, each, 0.0) for each in (k, g))
            cut_ref[...] = left(keys, kept, tail(kept), u, state)
            copy = pltpu.make_async_copy(cut_ref, at_ref.at[n, b, h], copied)
            copy.start()
            copy.wait()

    jax.lax.fori_loop(0, marked, cut, None)
    state_ref[...] = left(k, g, d.tail, u, state)
    finals_ref[0, 0] = state_ref[...]
