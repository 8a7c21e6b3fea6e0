"""Operations that a call needs, by formula, so that a time can be given as a share of the machine's best."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.state import nbytes

CHUNK = (
    16  # Whatever chunk an implementation takes, it is credited with the count for this one, the smallest.
)


def kda_flops_per_token_head(key_dim: int, value_dim: int, chunk: int = CHUNK) -> float:
    """Operations a token and head of chunked KDA, forward, causality exploited; a multiply-add is 2.

    `6 K V` (three products with the state), `C (3 K + 2 V)` (the two score matrices and what they multiply),
    `C^2 / 3` (the triangular inverse). One count for every implementation: one that does more work for the
    same result earns no credit.

    Source: "Kimi Linear" (arXiv:2510.26692), equation 13 (`6 d^2 + 3 C d + C^2`), written for K != V and
    lower triangles only.
    """
    return 6 * key_dim * value_dim + chunk * (3 * key_dim + 2 * value_dim) + chunk**2 / 3


def kda_flops(tokens: int, heads: int, key_dim: int, value_dim: int, *, backward: bool = False) -> float:
    """Operations of a call; with `backward`, of forward and backward: three forwards, nothing repeated."""
    return tokens * heads * kda_flops_per_token_head(key_dim, value_dim) * (3 if backward else 1)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model's calls need, from its config alone.

    Attributes:
        config: the model's config.
        shared: parameters that every token meets: all but embedding, routed experts and head.
        expert: parameters of one routed expert, and `expert_layers` the layers that have them.
        head: parameters of the head.
    """

    config: ModelConfig
    shared: int
    expert: int
    expert_layers: int
    head: int

    @classmethod
    def of(cls, config: ModelConfig) -> ModelWork:
        """Count a config's parameters; nothing is allocated."""
        model = nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))
        total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        layers = sum(kind == "moe" for kind in config.mlps)
        table = config.vocab_size * config.hidden_size
        tables = table if config.tie_embeddings else 2 * table
        return cls(config, total - tables - layers * config.num_experts * expert, expert, layers, table)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt: products with weights, KDA, causal attention; the head for one token."""
        config = self.config
        active = self.shared + self.expert_layers * config.experts_per_token * self.expert
        weights = 2.0 * (tokens * active + self.head)
        recurrent = kda_flops(tokens, config.kda_value_heads, config.kda_head_dim, config.kda_value_dim)
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        attention = 2.0 * config.num_heads * width * tokens * (tokens + 1) / 2
        kda_layers = sum(kind == "kda" for kind in config.layers)
        return weights + kda_layers * recurrent + (config.num_layers - kda_layers) * attention

    def decode_bytes(self, context: int, batch: int) -> float:
        """Bytes that one decode step moves at least, float32: weights once, with the experts that a batch is
        expected to choose when it chooses evenly; recurrent states read and written; latents read."""
        config = self.config
        missed = (1 - config.experts_per_token / config.num_experts) ** batch if config.num_experts else 1.0
        experts = self.expert_layers * config.num_experts * (1 - missed) * self.expert
        fixed = nbytes(config, 1, batch)
        latents = nbytes(config, context + 1, batch) - fixed
        return 4.0 * (self.shared + experts + self.head) + 2.0 * fixed + latents
