"""Backend "xla": KDA in plain JAX, in chunks of matrix products."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.chunk import product
from pallas_kernels.kda.gradient import chunked, chunked_at
from pallas_kernels.kda.grid import Form, Inputs
from pallas_kernels.kda.reference import Pack


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
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Backend "xla" of `kda_prefill`; heads of q, k and v are alike."""
    form = Form(chunk_size or 32, 1, gate_lower_bound is not None and gate_lower_bound >= -5.0, scale)
    batch, tokens = q.shape[:2]
    inputs = Inputs(*(x.astype(jnp.float32) for x in (q, k, v, g, beta)))
    if pack is not None:
        inputs = Inputs(*(x.reshape(1, batch * tokens, *x.shape[2:]) for x in inputs))
    if boundaries is None or boundaries.shape[1] == 0:
        # A grid's rows advance together: their heads are one axis of states.
        grouped = states if pack is not None else states.reshape(-1, *states.shape[2:])
        out, final = chunked(form, inputs, grouped, pack)
        final = final.reshape(states.shape)
        at = None if boundaries is None else jnp.zeros((states.shape[0], 0, *states.shape[1:]), jnp.float32)
    else:
        out, final, at = chunked_at(form, inputs, states, pack, boundaries)
    return out.reshape(v.shape).astype(v.dtype), final, at


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Backend "xla" of `kda_step`: both reads of the state in one product, so it is read twice and written once."""
    decay = jnp.exp(g)
    reads = product(jnp.stack([k * decay, q * decay], axis=-2), state)  # [B, H, 2, V]
    error = beta[..., None] * (v - reads[..., 0, :])
    out = reads[..., 1, :] + jnp.sum(q * k, axis=-1, keepdims=True) * error
    return out, decay[..., None] * state + k[..., None] * error[..., None, :]
