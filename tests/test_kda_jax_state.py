"""States: shapes, room, and bytes from shapes alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.config import ModelConfig
from kda_jax.state import KDAState, MLAState, ModelState, empty, grow, nbytes

CONFIG = dataclasses.replace(
    ModelConfig.tiny(), kda_num_heads=4, kda_head_dim=48, kda_v_head_dim=40, kda_num_v_heads=8
)


def test_is_empty_before_the_first_token() -> None:
    state = empty(CONFIG, batch=3, capacity=10, dtype=jnp.bfloat16)
    for kind, layer in zip(CONFIG.layers, state.layers):
        assert layer.position.tolist() == [0, 0, 0]
        if isinstance(layer, KDAState):
            assert kind == "kda"
            assert (layer.recurrent.shape, layer.recurrent.dtype) == ((3, 8, 48, 40), jnp.float32)
            assert (layer.conv.shape, layer.conv.dtype) == ((3, 3, 2 * 4 * 48 + 8 * 40), jnp.bfloat16)
        else:
            assert kind == "mla"
            assert (layer.latent.shape, layer.latent.dtype) == ((3, 10, 48 + 16), jnp.bfloat16)
    assert state.capacity == 10
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state))


def test_leaves_are_named() -> None:
    paths = jax.tree_util.tree_flatten_with_path(empty(CONFIG, 1, 1))[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    assert names[:3] == ["layers.0.recurrent", "layers.0.conv", "layers.0.position"]
    assert names[9:11] == ["layers.3.latent", "layers.3.position"]


def test_grows_behind_what_is_there() -> None:
    latent = jnp.arange(24, dtype=jnp.float32).reshape(1, 4, 6)
    recurrent = KDAState(jnp.ones((1, 1, 2, 2)), jnp.ones((1, 3, 6)), jnp.ones((1,), jnp.int32))
    state = ModelState((recurrent, MLAState(latent, jnp.ones((1,), jnp.int32))))
    more = grow(state, 7)
    assert more.capacity == 7
    assert isinstance(more.layers[1], MLAState)
    np.testing.assert_array_equal(more.layers[1].latent[:, :4], latent)
    assert more.layers[0] is recurrent
    assert jax.tree.leaves(grow(more, 5))[3] is more.layers[1].latent


def test_without_a_cache_there_is_no_capacity() -> None:
    config = dataclasses.replace(CONFIG, layers=("kda",), mlps=("dense",))
    assert empty(config, 1, 5).capacity is None


@pytest.mark.parametrize(("tokens", "dtype", "width"), [(1, jnp.float32, 4), (1000, jnp.bfloat16, 2)])
def test_bytes_follow_from_shapes(tokens: int, dtype: jnp.dtype, width: int) -> None:
    config = ModelConfig.kimi_linear_48b()
    kda = 32 * 128 * 128 * 4 + 3 * 12288 * width + 4
    mla = tokens * 576 * width + 4
    assert nbytes(config, tokens, 2, dtype) == 2 * (20 * kda + 7 * mla)


@pytest.mark.parametrize(("batch", "capacity"), [(0, 4), (4, 0)])
def test_refuses_a_state_of_nothing(batch: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        empty(CONFIG, batch, capacity)
