"""The definition, in the dtype of the states: one token of each row through everything between the projections."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.reference import update
from pallas_kernels.kda_decode.inputs import Form, KDAParameters, Tokens
from pallas_kernels.rms_norm import rms_norm_gated
from pallas_kernels.short_conv.reference import convolve


def token(
    x: Tokens, layer: KDAParameters, state: jax.Array, window: jax.Array, form: Form
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token a row: out [B, HV, V] in the dtype of `mixed`, the states [B, HV, K, V], the windows [B, W-1, C].

    The gate and the L2 norm are those of `kda_gate` and `l2_normalize`, which round to float32.
    """
    work = state.dtype
    mixed, decay, beta, gate = (a.astype(work) for a in x)
    conv, A_log, dt_bias, norm = (a.astype(work) for a in layer)
    each_row = jax.vmap(convolve, in_axes=(0, None, 0, None))
    mixed, windows = each_row(mixed[:, None], conv, window.astype(work), "silu")
    q, k, v = form.parts(mixed[:, 0], *state.shape[-2:])
    q, k = (jnp.repeat(_unit(a), v.shape[1] // form.heads, axis=1) for a in (q, k))

    z, rate = decay + dt_bias, jnp.exp(A_log)[:, None]
    if form.lower_bound is None:
        g = -rate * jax.nn.softplus(z)
    else:
        g = form.lower_bound * jax.nn.sigmoid(rate * z)
    out, state = update(form.scale * q, k, v, g, jax.nn.sigmoid(beta), state)
    out = rms_norm_gated(out, gate, norm, eps=form.eps)
    return out.astype(x.mixed.dtype), state, windows[:, 1].astype(window.dtype)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
