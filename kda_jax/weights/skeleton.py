"""A model's parameters by dotted path, and a model made from them: shapes first, values one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from kda_jax.config import ModelConfig
from kda_jax.model import Model


class _OneKey(nnx.Rngs):
    """For models of shapes alone: the same key for every parameter.

    Under a trace `nnx.Rngs` takes longer for a key the more it gave before: 93 layers would take a minute.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


def parameters(model: Model) -> dict[str, jax.Array]:
    """The parameters of a model by path, as `layers.0.attn.in_proj.kernel`."""
    return _by_path(model)


def assemble(
    config: ModelConfig, dtype: DTypeLike, value_of: Callable[[str, jax.ShapeDtypeStruct], jax.Array]
) -> Model:
    """Builds a model without drawing or allocating parameters, then asks for each of them.

    Args:
        config: the model's config.
        dtype: as `Model`'s.
        value_of: (path, shape and dtype) -> the parameter.
    """
    graphdef, params = nnx.split(outline(config, dtype))
    filled = [
        (key, param.replace(value_of(_dotted(key), param.get_value())))
        for key, param in nnx.to_flat_state(params)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def shapes(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and dtype of every parameter of a model that is not built."""
    return _by_path(outline(config, dtype))


def outline(config: ModelConfig, dtype: DTypeLike) -> Model:
    """A model of shapes alone: each parameter is a `jax.ShapeDtypeStruct`."""
    return nnx.eval_shape(lambda: Model(config, rngs=_OneKey(0), dtype=dtype))


def _by_path(model: Model) -> dict[str, Any]:
    return {_dotted(key): param.get_value() for key, param in nnx.to_flat_state(nnx.state(model))}


def _dotted(key: Sequence[Any]) -> str:
    return ".".join(map(str, key))
