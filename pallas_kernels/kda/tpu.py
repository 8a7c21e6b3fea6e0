"""Backend "tpu" of `kda_prefill`: the forward pass as one Pallas kernel for TPUs (Mosaic), a chunk of a head at a time.

Every operand is a whole chunk, 64 rows by all channels: what the derivation does with ever larger blocks is done with
masks on squares of 64, because a TPU takes slices of 8 rows and 128 channels and no smaller. The grid's last axis runs
over the chunks in order, and the state stays in the core's memory from one to the next.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.grid import MIN_LOG_DECAY
from pallas_kernels.kda.pallas import Results, Sequence
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.table import Marks, Table, make_table, mark, whole_rows

CHUNK = 64
LANES = 128
"""Channels come in multiples of this."""


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
    if chunk not in (None, CHUNK):
        raise ValueError(
            f"kda_prefill: the backend 'tpu' has chunks of {CHUNK} tokens, got chunk_size={chunk}"
        )
    q, k, v, g, beta, states = x
    batch, tokens, heads, keys = q.shape
    values, total = v.shape[3], batch * tokens
    pack = whole_rows(batch, tokens) if pack is None else pack
    asked = jnp.zeros((states.shape[0], 0), jnp.int32) if boundaries is None else boundaries
    table = make_table(pack, total, CHUNK)
    chunks = table.token.shape[0]
    extended, marks = mark(table, pack, asked, CHUNK)
    rows = table.token[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)
    own = jnp.arange(CHUNK, dtype=jnp.int32) < table.live[:, None]

    def chunked(x: jax.Array, fill: int) -> jax.Array:
        """[B, T, H, C] as [chunks, L, H * fill]: zeros behind a head's channels and in rows that are not a chunk's."""
        x = x.astype(jnp.float32).reshape(total, heads, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, fill - x.shape[2]))).reshape(total, -1)
        return jnp.where(own[..., None], x.at[jnp.minimum(rows, total - 1)].get(mode="clip"), 0.0)

    wide_keys, wide_values = (-(-size // LANES) * LANES for size in (keys, values))
    write = jnp.moveaxis(chunked(beta[..., None], 1), 2, 1)[..., None]  # [chunks, H, L, 1]
    padding = ((0, 0), (0, 0), (0, wide_keys - keys), (0, wide_values - values))
    queries, key_rows, decays = (chunked(x, wide_keys) for x in (q, k, g))
    out, finals, at = _call(
        queries,
        key_rows,
        decays,
        chunked(v, wide_values),
        write,
        jnp.pad(states, padding),
        table,
        Marks(marks.holder, extended.live[marks.chunk] if asked.size else marks.chunk),
        scale,
        interpret,
    )
    out = out.reshape(chunks * CHUNK, heads, wide_values)[..., :values]
    place = jnp.where(own, rows, total).reshape(-1)  # whoever is nobody's is dropped
    flat = jnp.zeros((total, heads, values), v.dtype).at[place].set(out.astype(v.dtype), mode="drop")
    inside = (..., slice(keys), slice(values))
    finals = jnp.where((pack.count > 0)[:, None, None, None], finals[inside], states)
    if boundaries is None:
        return flat.reshape(v.shape), finals, None
    at = jnp.where(marks.holder[..., None, None, None] < 0, states[:, None], at[inside])
    return flat.reshape(v.shape), finals, at


def _call(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    table: Table,
    marks: Marks,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel; `marks.chunk` holds how many rows of the holder stand before the boundary."""
    sequences, heads, keys, values = states.shape
    chunks, marked = q.shape[0], marks.holder.shape[1]
    number = jnp.arange(chunks, dtype=jnp.int32)
    # Spare chunks belong to the last sequence and hold no token: they hand its state on.
    owner = jnp.clip(jnp.searchsorted(table.first[1:-1], number, side="right"), 0, sequences - 1)
    owner = owner.astype(jnp.int32)
    begins = jnp.concatenate([jnp.ones((1,), jnp.int32), (owner[1:] != owner[:-1]).astype(jnp.int32)])
    some = max(marked, 1)  # no array of no elements
    holder, before = (x if marked else jnp.full((sequences, 1), -1, jnp.int32) for x in marks)

    def rows(channels: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, CHUNK, channels), lambda h, c, *_: (c, 0, h))

    state = pl.BlockSpec((1, 1, keys, values), lambda h, c, owner, *_: (owner[c], h, 0, 0))
    at = pl.BlockSpec((1, some, 1, keys, values), lambda h, c, owner, *_: (owner[c], 0, h, 0, 0))
    return pl.pallas_call(
        functools.partial(_body, scale=scale, marked=marked),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(heads, chunks),
            in_specs=[
                *(rows(keys) for _ in range(3)),
                rows(values),
                pl.BlockSpec((1, 1, CHUNK, 1), lambda h, c, *_: (c, h, 0, 0)),
                state,
            ],
            out_specs=[rows(values), state, at],
            scratch_shapes=[pltpu.VMEM((keys, values), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct(states.shape, jnp.float32),
            jax.ShapeDtypeStruct((sequences, some, *states.shape[1:]), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="kda_chunks",
    )(owner, begins, holder, before, q, k, g, v, beta, states)


def _body(
    owner_ref, begins_ref, holder_ref, before_ref, q_ref, k_ref, g_ref, v_ref, beta_ref, states_ref, out_ref,
    finals_ref, at_ref, state_ref, *, scale: float, marked: int,
):  # fmt: skip
    c = pl.program_id(1)

    @pl.when(begins_ref[c] == 1)
    def _():
        state_ref[...] = states_ref[0, 0]
        if marked:
            at_ref[...] = jnp.zeros_like(at_ref)

    q, k, v, beta, state = q_ref[0], k_ref[0], v_ref[0], beta_ref[0, 0], state_ref[...]
    g = jnp.maximum(g_ref[0], MIN_LOG_DECAY)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    writes, pairs = _matrices(q, k, g, row, column)
    inverse = _unit_lower_inverse(beta * writes, row, column)
    head = jnp.exp(_sums(row >= column, g))
    u = _dot(inverse, beta * (v - _dot(k * head, state)))
    out_ref[0] = (_dot(q * head, state) + _dot(pairs, u)) * scale

    def after(count) -> jax.Array:
        """The state behind the chunk's first `count` rows."""
        live = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < count
        kept = jnp.where(live, g, 0.0)
        tail = jnp.exp(_sums(row < column, kept))
        ones = jnp.ones((CHUNK, state.shape[1]), jnp.float32)
        decay = jnp.exp(_dot(kept, ones, over_rows=True))  # [K, V], alike in every column
        keys = jnp.where(live, k, 0.0) * tail
        return decay * state + _dot(keys, u, over_rows=True)

    n = owner_ref[c]
    for b in range(marked):

        @pl.when(holder_ref[n, b] == c)
        def _(b=b):
            at_ref[0, b, 0] = after(before_ref[n, b])

    state_ref[...] = after(CHUNK)
    finals_ref[0, 0] = state_ref[...]


def _dot(a: jax.Array, b: jax.Array, *, over_rows: bool = False, t: bool = False) -> jax.Array:
    """a @ b, a^T @ b, or a @ b^T, in full float32."""
    axes = ((0,), (0,)) if over_rows else ((1,), (1,)) if t else ((1,), (0,))
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _sums(mask: jax.Array, g: jax.Array) -> jax.Array:
    """For each row the sum of those rows of g that its mask names."""
    return _dot(jnp.where(mask, 1.0, 0.0), g)


def _matrices(
    q: jax.Array, k: jax.Array, g: jax.Array, row: jax.Array, column: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """k k^T (strictly lower) and q k^T (lower) with decays: a pair of rows meets where its blocks are neighbours, the
    later row decayed from its block's begin, the earlier one to its block's end."""
    writes = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    pairs = jnp.where(row == column, jnp.sum(q * k, axis=1, keepdims=True), 0.0)
    for level in range(CHUNK.bit_length() - 1):
        same = row >> level == column >> level
        meet = (row >> level == (column >> level) + 1) & (row >> (level + 1) == column >> (level + 1))
        head = jnp.exp(_sums(same & (row >= column), g))
        key = k * jnp.exp(_sums(same & (row < column), g))
        writes += jnp.where(meet, _dot(k * head, key, t=True), 0.0)
        pairs += jnp.where(meet, _dot(q * head, key, t=True), 0.0)
    return writes, pairs


def _unit_lower_inverse(a: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower a: neighbours' inverses at hand, the corner between them is -late a early."""
    inverse = jnp.where(row == column, 1.0, 0.0)
    for level in range(CHUNK.bit_length() - 1):
        meet = (row >> level == (column >> level) + 1) & (row >> (level + 1) == column >> (level + 1))
        inverse -= _dot(_dot(inverse, jnp.where(meet, a, 0.0)), inverse)
    return inverse
