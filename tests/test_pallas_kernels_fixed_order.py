"""A row's norm has the same bits in an array of any number of rows: the split law stands on it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from measure import assert_close
from pallas_kernels import l2_normalize, rms_norm
from pallas_kernels.fixed_order import sum_of_squares


@pytest.mark.parametrize("channels", [1, 2, 48, 100, 256])
def test_sum_of_squares_and_its_gradient(channels: int) -> None:
    x = np.random.default_rng(channels).standard_normal((3, channels))
    got, pull = jax.vjp(sum_of_squares, jnp.asarray(x, jnp.float32))
    assert_close("sum", np.sum(x * x, axis=-1, keepdims=True), got, 1e-6)
    cotangent = np.asarray([[1.0], [2.0], [-3.0]], np.float32)
    assert_close("gradient", 2 * x * cotangent, pull(jnp.asarray(cotangent))[0], 1e-6)


@pytest.mark.parametrize("shape", [(2048, 4, 48), (2048, 256)], ids=str)
@pytest.mark.parametrize(
    "norm", [l2_normalize, lambda x: rms_norm(x, jnp.ones(x.shape[-1:]), eps=1e-5)], ids=["l2", "rms"]
)
@pytest.mark.optimised
def test_a_row_alone_has_the_bits_it_has_among_many(norm, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    norm = jax.jit(norm)
    many = np.asarray(norm(x))
    for rows in (64, 1024):
        assert np.array_equal(many[:rows], np.asarray(norm(x[:rows])))
