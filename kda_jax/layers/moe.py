"""The sparse feed-forward network: a router, its experts, and the experts every token goes through."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kda_jax.config import ModelConfig
from kda_jax.layers.mlp import Mlp, activation_of
from kda_jax.layers.packed import PackedMatrices
from kda_jax.layers.projection import Linear, fan_in
from kda_jax.sharding import EXPERTS, TENSOR, AnyMesh, lay, over
from pallas_kernels import Mxfp4, expert_mlp, rms_norm
from pallas_kernels.precision import accumulator


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
    """y = sum over a token's experts of weight * MLP_expert(x), plus the shared experts' MLP(x).

    `w_gate_up` is [E, D, 2I], gate columns first; `w_down` is [E, I, D]. With MXFP4 experts both are
    `PackedMatrices`, [E, 2I, D] and [E, D, I].

    With `routed_expert_hidden_size` the experts work on latents of that width, the D of their matrices: `latent_down`
    takes x to them, and `latent_up` takes the experts' weighted sum back, after an RMS norm if the model has one
    (`latent_norm`). The router and the shared experts see x itself.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2; for the latents Kimi K3's checkpoint (`routed_expert_*`).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        latent = config.routed_expert_hidden_size
        width = hidden if latent is None else latent
        self.activation, self.norm_eps = activation_of(config), config.rms_norm_eps
        self.mesh: AnyMesh | None = None
        self.router = Router(config, rngs=rngs)
        if config.quantization is None:
            self.w_gate_up = fan_in(rngs, (experts, width, 2 * inner), dtype)
            self.w_down = fan_in(rngs, (experts, inner, width), dtype)
        else:
            self.w_gate_up = PackedMatrices(experts, 2 * inner, width, rngs=rngs)
            self.w_down = PackedMatrices(experts, width, inner, rngs=rngs)
        if config.num_shared_experts:
            size = inner * config.num_shared_experts
            self.shared = Mlp(hidden, size, activation=self.activation, rngs=rngs, dtype=dtype)
        else:
            self.shared = None
        if latent is None:
            self.latent_down = self.latent_up = None
        else:
            self.latent_down = Linear(hidden, latent, rngs=rngs, dtype=dtype)
            self.latent_up = Linear(latent, hidden, rngs=rngs, dtype=dtype)
        self.latent_norm = nnx.Param(jnp.ones((width,), dtype)) if config.latent_moe_norm else None

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
        inputs = rows if self.latent_down is None else lay(self.latent_down(rows), self.mesh, None, TENSOR)
        y = self._from_latents(self._mix(lay(inputs, self.mesh), experts, weights))
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.reshape(x.shape)

    def _mix(
        self, x: Float[Array, "N Z"], experts: Int[Array, "N slots"], weights: Float[Array, "N slots"]
    ) -> Float[Array, "N Z"]:
        """`expert_mlp`. Over devices, each adds up what its own experts make of all rows, and then all are added up."""
        matrices = _matrices(self.w_gate_up), _matrices(self.w_down)
        if self.mesh is None:
            return expert_mlp(x, experts, weights, *matrices, activation=self.activation)

        def mix(x, experts, weights, gate_up, down):
            first = jax.lax.axis_index(EXPERTS) * down.shape[0]
            wide = x.astype(accumulator(x.dtype))
            mine = expert_mlp(wide, experts - first, weights, gate_up, down, activation=self.activation)
            return jax.lax.psum(mine, EXPERTS).astype(x.dtype)

        whole, dealt = PartitionSpec(), PartitionSpec(EXPERTS)
        return over(self.mesh, mix, (whole, whole, whole, dealt, dealt), whole)(
            x, experts, weights, *matrices
        )

    def _from_latents(self, y: Float[Array, "N Z"]) -> Float[Array, "N D"]:
        if self.latent_norm is not None:
            y = rms_norm(y, self.latent_norm[...], eps=self.norm_eps)
        return y if self.latent_up is None else self.latent_up(y)


def _matrices(held: nnx.Param | PackedMatrices) -> Array | Mxfp4:
    return held() if isinstance(held, PackedMatrices) else held[...]
