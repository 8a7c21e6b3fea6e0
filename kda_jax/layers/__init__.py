"""The layers: each takes `(x, state)` and returns `(y, state)`, holds parameters only, and stands alone."""

from kda_jax.layers.kda import KimiDeltaAttention
from kda_jax.layers.mla import MultiHeadLatentAttention
from kda_jax.layers.mlp import Mlp
from kda_jax.layers.moe import Router, Routing, SparseMoE
from kda_jax.layers.projection import Linear, Projections

__all__ = [
    "KimiDeltaAttention",
    "Linear",
    "Mlp",
    "MultiHeadLatentAttention",
    "Projections",
    "Router",
    "Routing",
    "SparseMoE",
]
