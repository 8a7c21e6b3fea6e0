"""Backend "triton" of `kda_prefill`: the forward pass of three kernels. Its gradient is that of the backend "xla"."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import xla
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.triton.intra import intra
from pallas_kernels.kda.triton.merge import merge
from pallas_kernels.kda.triton.state import advance
from pallas_kernels.kda.triton.table import make_table, mark
from pallas_kernels.kda.triton.tile import BLOCK, Plan

CHUNK = 64


class Sequence(NamedTuple):
    """What is differentiated: q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], states [N, H, K, V]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    states: jax.Array


class Form(NamedTuple):
    """The static choices of a call."""

    scale: float
    gate_lower_bound: float | None
    chunk: int
    interpret: bool


def refusal(state: jax.Array) -> str | None:
    """Why this backend cannot do a call, or None."""
    return None if state.dtype == jnp.float32 else f"computes in float32, got a {state.dtype} state"


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    pack: Pack | None,
    boundaries: jax.Array | None,
    scale: float,
    gate_lower_bound: float | None,
    chunk_size: int | None,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """As the backend "xla"; `interpret` runs the kernels' bodies step by step on any device."""
    if q.size == 0:
        return xla.prefill(q, k, v, g, beta, states, pack, boundaries, scale, gate_lower_bound, None)
    form = Form(scale, gate_lower_bound, chunk_size or CHUNK, interpret)
    return _forward(form, Sequence(q, k, v, g, beta, states), pack, boundaries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(
    form: Form, x: Sequence, pack: Pack | None, boundaries: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    batch, tokens, heads, keys = x.q.shape
    values, total = x.v.shape[3], batch * tokens
    whole = pack is None
    if pack is None:
        first = np.arange(batch, dtype=np.int32) * tokens
        known: list[Any] = [first, np.full_like(first, tokens), np.zeros_like(first)]
        pack = Pack(*known)
    half = x.v.dtype == jnp.bfloat16
    plan = Plan(
        num_tokens=total,
        heads=heads,
        keys=_round_up(keys, 2 * BLOCK),
        values=_round_up(values, 2 * BLOCK),
        chunk=form.chunk,
        work=x.v.dtype if half else jnp.dtype(jnp.float32),
        interpret=form.interpret,
    )
    asked = jnp.zeros((pack.first.shape[0], 0), jnp.int32) if boundaries is None else boundaries
    table, marks = mark(make_table(pack, total, plan.chunk), pack, asked, plan.chunk)
    q, k, g = (_flat(y, plan.keys) for y in (x.q, x.k, x.g))
    beta = x.beta.reshape(total, heads).astype(jnp.float32)
    missing = (plan.keys - keys, plan.values - values)
    states = (
        jnp.pad(x.states, ((0, 0), (0, 0), *((0, more) for more in missing))) if any(missing) else x.states
    )

    matrices = intra(q, k, g, beta, table, plan)
    inverse = merge(matrices.writes, plan)
    v = _flat(x.v, plan.values)
    out, finals, at = advance(v, beta, matrices, inverse, states, table, marks, plan, form.scale)

    if not whole:
        out = jnp.where(_owned(pack, total)[:, None], out, 0)
    out = out.reshape(batch, tokens, heads, plan.values)[..., :values]
    at = jnp.where(marks.holder[..., None, None, None] < 0, states[:, None], at)
    inside = (..., slice(keys), slice(values))
    return out, finals[inside], None if boundaries is None else at[inside]


def _forward_fwd(form: Form, x: Sequence, pack: Pack | None, boundaries: jax.Array | None):
    if boundaries is not None:
        raise NotImplementedError(
            "kda_prefill: no gradients with boundaries; cut the call at the boundary instead"
        )
    return _forward(form, x, pack, None), (x, pack)


def _forward_bwd(form: Form, residuals, cotangents):
    x, pack = residuals

    def forward(x: Sequence):
        return xla.prefill(*x, pack, None, form.scale, form.gate_lower_bound, None)[:2]

    (dx,) = jax.vjp(forward, x)[1](cotangents[:2])
    none = None if pack is None else jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), pack)
    return dx, none, None


_forward.defvjp(_forward_fwd, _forward_bwd)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _flat(x: jax.Array, channels: int) -> jax.Array:
    """[B, T, H, C] as [B * T, H * channels], with zeros behind each head's own channels."""
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, channels - x.shape[3]),)) if channels != x.shape[3] else x
    return x.reshape(x.shape[0] * x.shape[1], -1)


def _owned(pack: Pack, total: int) -> jax.Array:
    """Which tokens belong to a sequence, [tokens]."""
    token = jnp.arange(total, dtype=jnp.int32)
    return ((token >= pack.first[:, None]) & (token < (pack.first + pack.count)[:, None])).any(axis=0)
