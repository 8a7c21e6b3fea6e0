"""Backend "xla": the public operators one after the other, each in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda import kda_gate, kda_step
from pallas_kernels.kda_decode.inputs import Form, KDAParameters, Tokens
from pallas_kernels.rms_norm import rms_norm_gated
from pallas_kernels.short_conv import short_conv_step


def token(
    x: Tokens, layer: KDAParameters, state: jax.Array, window: jax.Array, form: Form
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `reference.token`, in float32 inside each operator and in the dtype of `mixed` between them."""
    g = kda_gate(x.decay, layer.A_log, layer.dt_bias, lower_bound=form.lower_bound)
    beta = jax.nn.sigmoid(x.beta.astype(jnp.float32))
    mixed, window = short_conv_step(x.mixed, layer.conv, window)
    q, k, v = form.parts(mixed, *state.shape[-2:])
    out, state = kda_step(q, k, v, g, beta, state, scale=form.scale, qk_l2norm=True, implementation="xla")
    return rms_norm_gated(out, x.gate, layer.norm, eps=form.eps), state, window
