"""How large a model and its state are, from a config alone: nothing is allocated."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from kda_jax.config import ModelConfig
from kda_jax.sharding import shard_state
from kda_jax.state import KDAState, empty
from kda_jax.weights.names import hf_shapes, parameters_and_nbytes

CONTEXTS = (1024, 128 * 1024, 1024 * 1024)
ROUTED = "routed experts"
EMBEDDING = "embedding"
# the first of these that stands in a tensor's name says which part it belongs to
_PARTS = (
    (".experts.", ROUTED),
    (".self_attn.", "attention"),
    (".mlp.", "dense feed-forward"),
    (".block_sparse_moe.gate.", "router"),
    (".shared_experts.", "shared experts"),
    (".routed_expert_", "expert latents"),
    ("embed_tokens.", EMBEDDING),
    ("lm_head.", "head"),
    ("", "norms and residual mixing"),
)
# as they are shown
ORDER = (
    *(EMBEDDING, "KDA attention", "MLA attention", "dense feed-forward", "router", "shared experts"),
    *("expert latents", ROUTED, "norms and residual mixing", "head"),
)
_LAYER = re.compile(r"layers\.(\d+)\.")


class Sizes(NamedTuple):
    """Figures of one model.

    Attributes:
        parts: parameters by part, in the order of the model.
        total: parameters.
        active: parameters that one token meets: of the routed experts those chosen, and not the embedding, of
            which it reads one row.
        stored_nbytes: bytes of a released checkpoint: bfloat16, small tensors in float32, packed experts.
    """

    parts: dict[str, int]
    total: int
    active: int
    stored_nbytes: int


class StateBytes(NamedTuple):
    """Bytes of one sequence's state.

    Attributes:
        recurrent: float32, of all KDA layers, whatever the length.
        conv: of all KDA layers, whatever the length.
        latent_per_token: of all MLA layers.
        plain_per_token: keys and values of all of MLA's heads, in as many layers of plain attention.
    """

    recurrent: int
    conv: int
    latent_per_token: int
    plain_per_token: int

    @property
    def checkpoint(self) -> int:
        """What one boundary costs beside the latents, which its sequence shares."""
        return self.recurrent + self.conv

    def at(self, num_tokens: int) -> int:
        """The whole state after `num_tokens` tokens."""
        return self.checkpoint + num_tokens * self.latent_per_token


def sizes(config: ModelConfig) -> Sizes:
    """Counts the parameters of a released checkpoint of this config."""
    by_part: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {part: {} for part in ORDER}
    for name, row in hf_shapes(config).items():
        by_part[part_of(config, name, _PARTS)][name] = row
    counts = {part: parameters_and_nbytes(tensors) for part, tensors in by_part.items()}
    parts = {part: parameters for part, (parameters, _) in counts.items() if parameters}
    total, active = sum(parts.values()), sum(parts.values())
    if ROUTED in parts:
        active -= parts[ROUTED] // config.num_experts * (config.num_experts - config.experts_per_token)
    if not config.tie_embeddings:
        active -= parts[EMBEDDING]
    return Sizes(parts, total, active, sum(nbytes for _, nbytes in counts.values()))


def part_of(config: ModelConfig, name: str, marks: tuple[tuple[str, str], ...]) -> str:
    """The part of a model that a tensor belongs to: the one beside the first mark that stands in its name."""
    part = next(part for mark, part in marks if mark in name)
    if part != "attention":
        return part
    match = _LAYER.search(name)
    assert match is not None, name
    return f"{config.layers[int(match[1])].upper()} attention"


def state_bytes(
    config: ModelConfig, dtype: jnp.dtype | type = jnp.bfloat16, mesh: AbstractMesh | None = None
) -> StateBytes:
    """Bytes of a sequence's state whose latents and windows are of this dtype; with a mesh, those that one of its
    devices holds."""
    state = jax.eval_shape(lambda: empty(config, 1, 1, dtype))
    if mesh is not None:
        state = shard_state(state, mesh)
    recurrent = conv = latent = 0
    for layer in state.layers:
        if isinstance(layer, KDAState):
            recurrent += leaf_bytes(layer.recurrent)
            conv += leaf_bytes(layer.conv)
        else:
            latent += leaf_bytes(layer.latent)
    heads = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return StateBytes(recurrent, conv, latent, config.num_layers * heads * jnp.dtype(dtype).itemsize)


def leaf_bytes(leaf: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes of a leaf that one device holds, all of it where it has no sharding."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
