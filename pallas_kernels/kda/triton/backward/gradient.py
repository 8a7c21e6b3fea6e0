"""The backward pass of five kernels: one of the forward again, and four of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.pallas import Sequence
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.table import make_table, whole_rows
from pallas_kernels.kda.triton.backward.contract import contract
from pallas_kernels.kda.triton.backward.pull_back import pull_back
from pallas_kernels.kda.triton.backward.retreat import retreat
from pallas_kernels.kda.triton.backward.states import trace_states
from pallas_kernels.kda.triton.intra import intra
from pallas_kernels.kda.triton.prefill import flat, make_plan, owned


def backward(
    x: Sequence,
    pack: Pack | None,
    d_out: jax.Array,
    d_finals: jax.Array,
    *,
    scale: float,
    chunk: int | None,
    interpret: bool,
) -> Sequence:
    """A `pallas.Backward`; `chunk` is 16, 32 or 64, None for 64."""
    batch, tokens, heads, keys = x.q.shape
    values, total = x.v.shape[3], batch * tokens
    whole = pack is None
    if pack is None:
        pack = whole_rows(batch, tokens)
    plan = make_plan(x, chunk, interpret)._replace(ends=jnp.dtype(jnp.float32))
    table = make_table(pack, total, plan.chunk)
    q, k, g = (flat(y, plan.keys) for y in (x.q, x.k, x.g))
    v, d_out = (flat(y, plan.values) for y in (x.v, d_out))
    beta = x.beta.reshape(total, heads).astype(jnp.float32)
    missing = ((0, 0), (0, 0), (0, plan.keys - keys), (0, plan.values - values))
    if plan.keys != keys or plan.values != values:
        x, d_finals = x._replace(states=jnp.pad(x.states, missing)), jnp.pad(d_finals, missing)

    matrices = intra(q, k, g, beta, table, plan)
    before, u = trace_states(v, beta, matrices, x.states, table, plan)
    after, d_write, d_states = retreat(d_out, beta, matrices, d_finals, table, plan, scale)
    d, d_v, d_beta = contract(v, d_out, beta, u, d_write, before, after, table, plan, scale)
    d_q, d_k, d_g, parts = pull_back(q, k, g, beta, d, table, plan)
    d_beta = d_beta + jnp.sum(parts, axis=0)

    mine = None if whole else owned(pack, total)[:, None]

    def shaped(d: jax.Array, like: jax.Array) -> jax.Array:
        d = d if mine is None else jnp.where(mine, d, 0)
        return d.reshape(batch, tokens, heads, -1)[..., : like.shape[3]].astype(like.dtype)

    return Sequence(
        q=shaped(d_q, x.q),
        k=shaped(d_k, x.k),
        v=shaped(d_v, x.v),
        g=shaped(d_g, x.g),
        beta=shaped(d_beta, x.beta[..., None])[..., 0],
        states=d_states[..., :keys, :values],
    )
