"""The layers: each takes `(x, state)` and returns `(y, state)`, holds parameters only, and stands alone."""

from kda_jax.layers.kda import KimiDeltaAttention
from kda_jax.layers.mla import MultiHeadLatentAttention
from kda_jax.layers.mlp import Mlp, activation_of
from kda_jax.layers.moe import Router, Routing, SparseMoE
from kda_jax.layers.packed import Packed, PackedMatrices
from kda_jax.layers.projection import Linear, Projections
from kda_jax.layers.residual import ResidualMix, Residuals

__all__ = [
    "KimiDeltaAttention",
    "Linear",
    "Mlp",
    "MultiHeadLatentAttention",
    "Packed",
    "PackedMatrices",
    "Projections",
    "ResidualMix",
    "Residuals",
    "Router",
    "Routing",
    "SparseMoE",
    "activation_of",
]
