"""The dense feed-forward network."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.layers.projection import Linear


class Mlp(nnx.Module):
    """SwiGLU: (silu(x W_gate) * x W_up) W_down. `gate_up.kernel` is [D, 2F], gate columns first."""

    def __init__(self, hidden_size: int, inner_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.gate_up = Linear(hidden_size, 2 * inner_size, rngs=rngs, dtype=dtype)
        self.down = Linear(inner_size, hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)
