"""The forward pass of two kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.pallas import Results, Sequence
from pallas_kernels.kda.prelude import Prelude
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.table import make_table, mark, whole_rows
from pallas_kernels.kda.triton.intra import intra
from pallas_kernels.kda.triton.state import advance
from pallas_kernels.kda.triton.tile import BLOCK, Plan

CHUNK = 64


def forward(
    x: Sequence,
    pack: Pack | None,
    boundaries: jax.Array | None,
    *,
    scale: float,
    chunk: int | None,
    interpret: bool,
) -> Results:
    """A `pallas.Forward`; `chunk` is 16, 32 or 64, None for 64."""
    return fused(x, Prelude(), pack, boundaries, scale=scale, chunk=chunk, interpret=interpret)


def fused(
    x: Sequence,
    prelude: Prelude,
    pack: Pack | None,
    boundaries: jax.Array | None,
    *,
    scale: float,
    chunk: int | None,
    interpret: bool,
) -> Results:
    """A `pallas.Fused`; `chunk` is 16, 32 or 64, None for 64."""
    batch, tokens, heads, keys = x.g.shape
    values, total = x.v.shape[3], batch * tokens
    gate = prelude.gate
    whole = pack is None
    if pack is None:
        pack = whole_rows(batch, tokens)
    plan = make_plan(x, chunk, interpret)._replace(
        repeats=heads // x.q.shape[2],
        qk_l2norm=prelude.qk_l2norm,
        gated=gate is not None,
        lower_bound=None if gate is None else gate.lower_bound,
    )
    asked = jnp.zeros((pack.first.shape[0], 0), jnp.int32) if boundaries is None else boundaries
    table, marks = mark(make_table(pack, total, plan.chunk), pack, asked, plan.chunk)
    q, k, g = (flat(y, plan.keys) for y in (x.q, x.k, x.g))
    if gate is not None and gate.dt_bias is not None:
        gate = gate._replace(dt_bias=flat(gate.dt_bias[None, None], plan.keys)[0])
    beta = x.beta.reshape(total, heads)
    missing = (plan.keys - keys, plan.values - values)
    states = (
        jnp.pad(x.states, ((0, 0), (0, 0), *((0, more) for more in missing))) if any(missing) else x.states
    )

    matrices = intra(q, k, g, beta, table, plan, gate)
    v = flat(x.v, plan.values)
    out, finals, at = advance(v, beta, matrices, states, table, marks, plan, scale)

    if not whole:
        out = jnp.where(owned(pack, total)[:, None], out, 0)
    out = out.reshape(batch, tokens, heads, plan.values)[..., :values]
    at = jnp.where(marks.holder[..., None, None, None] < 0, states[:, None], at)
    inside = (..., slice(keys), slice(values))
    return out, finals[inside], None if boundaries is None else at[inside]


def make_plan(x: Sequence, chunk: int | None, interpret: bool) -> Plan:
    """The sizes of a call, with what is ready; channels are rounded up to what a kernel takes."""
    batch, tokens, heads, keys = x.g.shape
    return Plan(
        num_tokens=batch * tokens,
        heads=heads,
        keys=_round_up(keys, 2 * BLOCK),
        values=_round_up(x.v.shape[3], 2 * BLOCK),
        chunk=chunk or CHUNK,
        work=x.v.dtype if x.v.dtype == jnp.bfloat16 else jnp.dtype(jnp.float32),
        interpret=interpret,
    )


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def flat(x: jax.Array, channels: int) -> jax.Array:
    """[B, T, H, C] as [B * T, H * channels], with zeros behind each head's own channels."""
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, channels - x.shape[3]),)) if channels != x.shape[3] else x
    return x.reshape(x.shape[0] * x.shape[1], -1)


def owned(pack: Pack, total: int) -> jax.Array:
    """Which tokens belong to a sequence, [tokens]."""
    token = jnp.arange(total, dtype=jnp.int32)
    return ((token >= pack.first[:, None]) & (token < (pack.first + pack.count)[:, None])).any(axis=0)
