"""The dense feed-forward network."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.config import ModelConfig
from kda_jax.layers.projection import Linear
from pallas_kernels import Activation, SituGlu, swiglu


class Mlp(nnx.Module):
    """act(x W_gate, x W_up) W_down. `gate_up.kernel` is [D, 2F], gate columns first.

    Args:
        hidden_size: width of input and output (D).
        inner_size: width between (F).
        activation: (gate, up) -> hidden; silu(gate) * up if not given.
        rngs: `params` is drawn from.
        dtype: of the kernels.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        activation: Activation = swiglu,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ):
        self.activation = activation
        self.gate_up = Linear(hidden_size, 2 * inner_size, rngs=rngs, dtype=dtype)
        self.down = Linear(inner_size, hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(self.activation(gate, up))


def activation_of(config: ModelConfig) -> Activation:
    """The activation of a model's feed-forward networks, dense, shared and routed."""
    if config.situ_beta is None or config.situ_linear_beta is None:
        return swiglu
    return SituGlu(config.situ_beta, config.situ_linear_beta)
