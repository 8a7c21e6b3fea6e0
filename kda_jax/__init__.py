"""Kimi Linear in JAX."""

from kda_jax.config import ModelConfig
from kda_jax.forward import decode, prefill, split
from kda_jax.layers import KimiDeltaAttention, MultiHeadLatentAttention
from kda_jax.model import Model
from kda_jax.state import KDAState, MLAState, ModelState, empty, grow

__all__ = [
    "KDAState",
    "KimiDeltaAttention",
    "MLAState",
    "Model",
    "ModelConfig",
    "ModelState",
    "MultiHeadLatentAttention",
    "decode",
    "empty",
    "grow",
    "prefill",
    "split",
]
