"""The definition of KDA: one token after another, in the dtype of its inputs (float64 is the judge in tests)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pack(NamedTuple):
    """Where the tokens of each sequence lie on a flat token axis: rows [first, first + count)."""

    first: jax.Array  # [N] int32
    count: jax.Array  # [N] int32
    start: jax.Array  # [N] int32, tokens that the sequence's state has absorbed before this call


def update(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: decay, then correct what the state says of k towards v, then read with q.

    q, k, g [..., K]; v [..., V]; beta [...]; state [..., K, V]. Returns out [..., V] and the new state.
    """
    state = jnp.exp(g)[..., None] * state
    error = v - jnp.einsum("...kv,...k->...v", state, k, precision="highest")
    state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
    return jnp.einsum("...kv,...k->...v", state, q, precision="highest"), state


def recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    pack: Pack,
    boundaries: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """KDA over a flat token axis: q, k, g [M,H,K]; v [M,H,V]; beta [M,H]; states [N,H,K,V]; boundaries [N,NB].

    Returns out [M,H,V] (0 in rows of no sequence), final states and states at boundaries [N,NB,H,K,V] or None.
    """
    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    belongs = (rows[:, None] >= pack.first) & (rows[:, None] < pack.first + pack.count)  # [M, N]

    def token(states, inputs):
        (q, k, v, g, beta), mine = inputs
        n = jnp.argmax(mine)
        out, state = update(q, k, v, g, beta, states[n])
        live = jnp.any(mine)
        state = jnp.where(live, state, states[n])
        out = jnp.where(live, out, jnp.zeros_like(out))
        return states.at[n].set(state), (out, None if boundaries is None else state)

    final, (out, trace) = jax.lax.scan(token, states, ((q, k, v, g, beta), belongs))
    if boundaries is None or trace is None:
        return out, final, None
    at = trace[jnp.maximum(pack.first[:, None] + boundaries - 1, 0)]  # [N, NB, H, K, V]
    return out, final, jnp.where((boundaries == 0)[..., None, None, None], states[:, None], at)
