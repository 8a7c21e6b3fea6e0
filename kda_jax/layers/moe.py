"""The sparse feed-forward network: a router, its experts, and the experts every token goes through."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kda_jax.config import ModelConfig
from kda_jax.layers.mlp import Mlp
from kda_jax.layers.projection import fan_in
from pallas_kernels import expert_mlp


class Routing(NamedTuple):
    """The experts of each token and the weights, float32, of their outputs."""

    experts: Int[Array, "*rows slots"]
    weights: Float[Array, "*rows slots"]


class Router(nnx.Module):
    """Sigmoid router. `bias` corrects the choice of experts only, never their weights; both parameters are
    float32.

    Train `kernel` by gradient. `bias` gets none: balance the load by raising it where `SparseMoE.route`
    chooses an expert too rarely, and lowering it where too often.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2; transformers 5.24 `KimiLinearTopkRouter`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.kernel = fan_in(rngs, (config.hidden_size, config.num_experts), jnp.float32)
        self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))

    def __call__(self, x: Float[Array, "*rows D"]) -> Routing:
        """Chooses `experts_per_token` experts for each row; of equals the lower id."""
        config = self.config
        scores = jax.nn.sigmoid(_logits(x.astype(jnp.float32), self.kernel[...]))
        rated = self._keep_groups(jax.lax.stop_gradient(scores) + self.bias[...])
        experts = jax.lax.top_k(rated, config.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.moe_renormalize:
            # Added up one by one: XLA orders a reduction by the number of rows, and a row's bits would depend on it.
            total = sum(weights[..., slot, None] for slot in range(config.experts_per_token))
            weights = weights / (total + 1e-20)
        return Routing(experts, weights * config.routed_scaling_factor)

    def _keep_groups(self, rated: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        groups, kept = self.config.num_expert_groups, self.config.topk_groups
        if kept == groups:
            return rated
        grouped = rated.reshape(*rated.shape[:-1], groups, -1)
        two = jax.lax.top_k(grouped, 2)[0]
        worth = two[..., 0] + two[..., 1]
        best = jax.lax.top_k(worth, kept)[1]
        keep = (best[..., None] == jnp.arange(groups, dtype=best.dtype)).any(axis=-2)
        return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(rated.shape)


def _logits(x: Float[Array, "*rows D"], kernel: Float[Array, "D E"]) -> Float[Array, "*rows E"]:
    """x @ kernel, a row of which has the same bits in any number of rows from 64 on.

    XLA's CPU product has another order for fewer than 96 rows and at most 8 columns: it gets columns of zeros.
    """
    num_experts = kernel.shape[-1]
    if num_experts >= 16 or x.size < 64 * x.shape[-1]:
        return x @ kernel
    return (x @ jnp.pad(kernel, ((0, 0), (0, 16 - num_experts))))[..., :num_experts]


class SparseMoE(nnx.Module):
    """y = sum over a token's experts of weight * SwiGLU_expert(x), plus the shared experts' SwiGLU(x).

    `w_gate_up` is [E, D, 2I], gate columns first; `w_down` is [E, I, D].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.router = Router(config, rngs=rngs)
        self.w_gate_up = fan_in(rngs, (experts, hidden, 2 * inner), dtype)
        self.w_down = fan_in(rngs, (experts, inner, hidden), dtype)
        if config.num_shared_experts:
            self.shared = Mlp(hidden, inner * config.num_shared_experts, rngs=rngs, dtype=dtype)
        else:
            self.shared = None

    def route(self, x: Float[Array, "*rows D"]) -> Routing:
        """The experts and weights this layer would use for `x`."""
        return self.router(x)

    def __call__(
        self, x: Float[Array, "*rows D"], live: Bool[Array, "*rows"] | None = None
    ) -> Float[Array, "*rows D"]:
        """Mixes the experts of each row. Rows that are not `live` (padding) cost no expert; their y means nothing."""
        rows = x.reshape(-1, x.shape[-1])
        experts, weights = self.router(rows)
        if live is not None:
            experts = jnp.where(live.reshape(-1, 1), experts, -1)
        y = expert_mlp(rows, experts, weights, self.w_gate_up[...], self.w_down[...])
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.reshape(x.shape)
