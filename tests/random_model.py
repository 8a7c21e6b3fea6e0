"""Models with weights from a seed, in which every part matters. Numpy draws them: no program is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.weights.skeleton import assemble

SMALL: dict[str, Any] = dict(
    vocab_size=67,
    hidden_size=24,
    layers=("kda", "mla"),
    mlps=("dense", "moe"),
    intermediate_size=20,
    model_max_length=1024,
    kda_num_heads=2,
    kda_head_dim=8,
    num_heads=3,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=4,
    v_head_dim=6,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate_size=14,
    num_shared_experts=1,
)


K3: dict[str, Any] = dict(
    gate_lower_bound=-5.0,
    full_rank_gate=True,
    mla_output_gate=True,
    q_lora_rank=10,
    attn_res_block_size=2,
    routed_expert_hidden_size=32,
    moe_intermediate_size=32,
    latent_moe_norm=True,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    quantization="mxfp4",
    layers=("mla", "kda", "mla"),
    mlps=("dense", "moe", "dense"),
)
"""Changes that give a small config all of Kimi K3's parts: two layers in its first block, one in its second."""


def small_config(**changes: Any) -> ModelConfig:
    """Two layers, one of each kind, in which no two sizes are equal by accident."""
    return ModelConfig(**{**SMALL, **changes})


def random_model(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Model:
    """A model whose kernels keep the scale of their input, with random norms, decays and biases.

    With the usual small initial weights a layer adds next to nothing, and a wrong one goes unseen.
    """
    rng = np.random.default_rng(seed)

    def value_of(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(_draw(rng, path.split(".")[-1], path, shape.shape).astype(shape.dtype))

    return assemble(config, dtype, value_of)


def _draw(rng: np.random.Generator, name: str, path: str, shape: tuple[int, ...]) -> np.ndarray:
    if name == "A_log":
        return np.log(rng.uniform(1, 16, shape))
    if name == "dt_bias":
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
        return step + np.log(-np.expm1(-step))
    if name == "bias":
        return 0.1 * rng.standard_normal(shape)
    if name.endswith("norm"):
        return rng.uniform(0.5, 1.5, shape)
    if name == "embed":
        return rng.standard_normal(shape)
    if name == "packed":
        return rng.integers(0, 256, shape)
    if name == "scale":  # MXFP4's numbers have an rms of 2.9: these keep the scale of 32 to 64 inputs
        return rng.integers(122, 125, shape)
    fan_in = shape[-1] if name == "w_uk" else shape[-2]
    return rng.standard_normal(shape) * fan_in**-0.5
