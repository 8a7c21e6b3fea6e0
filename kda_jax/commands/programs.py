"""The two programs that a model runs as, from shapes alone and over a mesh: a call of prefill, and a decode step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kda_jax.commands.sizes import leaf_bytes
from kda_jax.config import ModelConfig
from kda_jax.forward import decode, prefill
from kda_jax.sharding import AnyMesh, automatic, shard, shard_state
from kda_jax.state import empty
from kda_jax.weights.skeleton import outline

STATE = 2
"""The programs' argument that is the state. Its memory is given up for the new one's."""


class Calls(NamedTuple):
    """How the programs are called.

    Attributes:
        tokens: that prefill reads, of one sequence.
        rows: sequences that decode reads a token of.
        context: tokens that each sequence has room for.
    """

    tokens: int
    rows: int
    context: int


class Program(NamedTuple):
    """A program, to be jitted.

    Attributes:
        name: "prefill" or "decode".
        function: (parameters, tokens, state) -> logits of each row's last token, and the state behind.
        arguments: shapes with shardings.
        residual_bytes: of the closed residual blocks, on one device, which has them whole.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    residual_bytes: int

    @property
    def parameter_bytes(self) -> int:
        """On one device."""
        return sum(map(leaf_bytes, jax.tree.leaves(self.arguments[0])))

    @property
    def state_bytes(self) -> int:
        """Of all rows, on one device."""
        return sum(map(leaf_bytes, jax.tree.leaves(self.arguments[STATE])))


def one_of_each(config: ModelConfig) -> ModelConfig:
    """The config of a model of as few layers as have all kinds of the whole one's, in their order."""
    kinds = dict.fromkeys(zip(config.layers, config.mlps))
    return dataclasses.replace(
        config, layers=tuple(attention for attention, _ in kinds), mlps=tuple(mlp for _, mlp in kinds)
    )


def closed_blocks(config: ModelConfig) -> int:
    """Residual blocks that are kept beside the open one, at the end of a model's layers."""
    return 0 if config.attn_res_block_size is None else -(-config.num_layers // config.attn_res_block_size)


def programs(config: ModelConfig, mesh: AnyMesh, calls: Calls) -> tuple[Program, Program]:
    """Prefill and decode of a model in bfloat16, whose packed experts stay packed.

    Raises:
        ValueError: the model does not divide over the mesh.
    """
    mesh = automatic(mesh)
    graphdef, params = nnx.split(shard(outline(config, jnp.bfloat16), mesh))

    def read(params: Any, tokens: jax.Array, state: Any) -> Any:
        return prefill((graphdef, params), tokens, state, last_only=True)

    def step(params: Any, tokens: jax.Array, state: Any) -> Any:
        return decode((graphdef, params), tokens, state)

    def program(name: str, function: Callable[..., Any], shape: tuple[int, ...]) -> Program:
        whole = NamedSharding(mesh, PartitionSpec())
        state = jax.eval_shape(lambda: empty(config, shape[0], calls.context, jnp.bfloat16))
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)
        residuals = closed_blocks(config) * math.prod(shape) * config.hidden_size * 2
        return Program(name, function, (params, tokens, shard_state(state, mesh)), residuals)

    return program("prefill", read, (1, calls.tokens)), program("decode", step, (calls.rows,))
