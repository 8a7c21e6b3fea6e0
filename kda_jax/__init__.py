"""Kimi Linear and Kimi K3 in JAX."""

from kda_jax.config import ModelConfig
from kda_jax.forward import decode, prefill, split
from kda_jax.generate import Generation, generate, stream
from kda_jax.layers import KimiDeltaAttention, MultiHeadLatentAttention
from kda_jax.model import Model
from kda_jax.sharding import partition, partition_state, shard, shard_state
from kda_jax.state import KDAState, MLAState, ModelState, empty, grow
from kda_jax.tokenizer import Tokenizer, load_tokenizer
from kda_jax.weights import load, load_orbax, load_state, save, save_orbax, save_state

__all__ = [
    "Generation",
    "KDAState",
    "KimiDeltaAttention",
    "MLAState",
    "Model",
    "ModelConfig",
    "ModelState",
    "MultiHeadLatentAttention",
    "Tokenizer",
    "decode",
    "empty",
    "generate",
    "grow",
    "load",
    "load_orbax",
    "load_state",
    "load_tokenizer",
    "partition",
    "partition_state",
    "prefill",
    "save",
    "save_orbax",
    "save_state",
    "shard",
    "shard_state",
    "split",
    "stream",
]
