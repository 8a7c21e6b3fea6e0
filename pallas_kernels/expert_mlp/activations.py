"""What stands between an MLP's two products: the gated activations of Kimi's models."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.precision import accumulator


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up."""
    return jax.nn.silu(gate) * up


@dataclass(frozen=True, slots=True)
class SituGlu:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta): SwiGLU that cannot grow without bound.

    Takes and returns arrays of one float dtype; float32 (or wider) inside. Equal bounds make equal functions.

    Attributes:
        beta: bound of the gate's half.
        linear_beta: bound of the other.

    Source: Kimi K3's checkpoint (`hidden_act` "situ").
    """

    beta: float
    linear_beta: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        wide = accumulator(gate.dtype)
        g, u = gate.astype(wide), up.astype(wide)
        hidden = self.beta * jnp.tanh(g / self.beta) * jax.nn.sigmoid(g)
        return (hidden * (self.linear_beta * jnp.tanh(u / self.linear_beta))).astype(gate.dtype)
