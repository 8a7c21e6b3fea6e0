"""A state in the cache's form and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cache import Sized
from kda_jax.config import ModelConfig
from kda_jax.engine import cut, join
from kda_jax.state import MLAState, ModelState, empty
from kda_jax.weights import WeightsError
from pallas_kernels.state_compression import compress_state, decompress_state
from random_model import small_config
from same_state import assert_same_state

CONFIG = small_config(layers=("kda", "mla", "kda", "mla"), mlps=("dense",) * 4)


def state_of(tokens: int, *, capacity: int = 40, rows: int = 1, config: ModelConfig = CONFIG) -> ModelState:
    """Random numbers in every leaf, the dead rows of latents too."""
    rng = np.random.default_rng(tokens)

    def fill(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.full_like(leaf, tokens)
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(fill, empty(config, rows, capacity))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 39, 40])
def test_a_state_comes_back_bit_by_bit(tokens: int) -> None:
    state = state_of(tokens)
    leaves, pages = cut(state, 8)
    assert len(pages) == tokens // 8
    assert all(rows.keys() == {"layers.1.latent", "layers.3.latent"} for rows in pages)
    assert all(leaf.shape == (1, 8, 16) for rows in pages for leaf in rows.values())
    assert leaves["layers.3.latent"].shape == (1, tokens % 8, 16)
    again = join(leaves, pages)
    assert again.capacity == tokens
    assert_same_state(state, again)


def test_rows_are_where_they_belong() -> None:
    state = state_of(21)
    layer = state.layers[1]
    assert isinstance(layer, MLAState)
    leaves, pages = cut(state, 8)
    for n, rows in enumerate(pages):
        np.testing.assert_array_equal(rows["layers.1.latent"], layer.latent[:, 8 * n : 8 * n + 8])
    np.testing.assert_array_equal(leaves["layers.1.latent"], layer.latent[:, 16:21])


@pytest.mark.parametrize(("after", "left"), [(0, 3), (7, 3), (8, 2), (17, 1), (24, 0), (100, 0)])
def test_pages_that_are_held_are_left_out(after: int, left: int) -> None:
    state = state_of(25)
    leaves, pages = cut(state, 8)
    same, some = cut(state, 8, after=after)
    assert len(some) == left
    for want, got in zip([leaves, *pages[3 - left :]], [same, *some], strict=True):
        jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize("tokens", [5, 8, 11], ids=["no-page", "one-page", "more"])
@pytest.mark.parametrize("int8", [False, True], ids=["exact", "int8"])
def test_nothing_is_shared(tokens: int, int8: bool) -> None:
    """Not even where a page is the whole buffer."""
    state = state_of(tokens, capacity=tokens)
    leaves, pages = cut(state, 8, int8=int8)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    again = join(leaves, pages)
    want = jax.tree.map(np.array, again)
    for leaf in jax.tree.leaves(again):
        leaf.delete()
    assert_same_state(want, join(leaves, pages))


def test_int8_is_the_compressed_state() -> None:
    state = state_of(11)
    leaves, pages = cut(state, 8, int8=True)
    exact, _ = cut(state, 8)
    assert leaves["layers.0.recurrent.values"].dtype == jnp.int8 and "layers.0.recurrent" not in leaves
    want = {
        name: decompress_state(compress_state(leaf)) if "recurrent" in name else leaf
        for name, leaf in exact.items()
    }
    again = join(leaves, pages)
    assert_same_state(join(want, pages), again)
    jax.tree.map(np.testing.assert_array_equal, leaves, cut(again, 8, int8=True).state)


def test_a_model_without_latents_has_empty_pages() -> None:
    state = state_of(20, config=small_config(layers=("kda", "kda")))
    leaves, pages = cut(state, 8)
    assert pages == [{}, {}]
    assert_same_state(state, join(leaves, pages))


def without(name: str) -> Callable[[Any, Any], Any]:
    return lambda leaves, pages: join({key: leaves[key] for key in leaves if key != name}, pages)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda *_: cut(state_of(9, rows=2), 8), ValueError, "one row, got 2"),
        (lambda *_: cut(state_of(9), 0), ValueError, "page=0 must be positive"),
        (lambda *_: cut(state_of(9), 8, after=-1), ValueError, "after=-1 not negative"),
        (lambda leaves, pages: join(leaves, pages[1:]), ValueError, "25 tokens came with 17 rows"),
        (lambda leaves, pages: join(leaves, [*pages, pages[0]]), ValueError, "25 tokens came with 33 rows"),
        (without("layers.0.conv"), WeightsError, r"the checkpoint is no whole state.*layers\.0\.conv"),
        (without("layers.2.recurrent.scales"), WeightsError, r"layers\.2\.recurrent\.values"),
        (without("layers.2.recurrent.values"), WeightsError, r"layers\.2\.recurrent\.scales"),
        (lambda leaves, pages: join(leaves, [Sized(64)] * 3), ValueError, "arrays by name, got Sized"),
        (
            lambda leaves, pages: join(
                leaves, [*pages[:2], {"layers.1.latent": pages[2]["layers.1.latent"]}]
            ),
            ValueError,
            "25 tokens came with 17 rows",
        ),
    ],
    ids=[
        *("rows", "page", "after", "a-page-short", "a-page-more"),
        *("no-window", "no-scales", "no-values", "no-arrays", "a-layers-page-short"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], words: str) -> None:
    leaves, pages = cut(state_of(25), 8, int8="recurrent" in words)
    with pytest.raises(error, match=f"(?s){words}"):
        call(leaves, pages)
