"""Matrix products of few rows, and zeros that wait for their layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from measure import assert_close
from pallas_kernels.buffers import zeros_after
from pallas_kernels.precision import rows_matmul, rows_matmul_t


@pytest.mark.optimised
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_few_rows(rows: int, transposed: bool) -> None:
    random = np.random.default_rng(rows)
    x, matrix = (random.standard_normal(shape).astype(np.float32) for shape in ((rows, 96), (96, 40)))
    run = jax.jit(rows_matmul_t if transposed else rows_matmul)
    given = np.ascontiguousarray(matrix.T) if transposed else matrix
    got = np.asarray(run(x, given))
    assert_close("product", x.astype(np.float64) @ matrix, got, 1e-6)
    if 1 < rows <= 8:
        for row in range(rows):
            np.testing.assert_array_equal(got[row], np.asarray(run(x[row : row + 1], given))[0])


def test_products_have_gradients_and_keep_wide_sums() -> None:
    x, matrix = jnp.ones((3, 8)), jnp.ones((8, 5))
    dx, dm = jax.grad(lambda a, b: jnp.sum(rows_matmul(a, b) + rows_matmul_t(a, b.T)), argnums=(0, 1))(
        x, matrix
    )
    np.testing.assert_array_equal(dx, np.full((3, 8), 10.0))
    np.testing.assert_array_equal(dm, np.full((8, 5), 6.0))
    half = rows_matmul(x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16))
    assert half.dtype == jnp.float32


@pytest.mark.parametrize("product", [rows_matmul, rows_matmul_t])
def test_products_are_in_full_float32_on_devices_whose_default_is_coarser(product: Any) -> None:
    for rows in (3, 9):
        text = (
            jax.jit(product)
            .trace(jnp.ones((rows, 8)), jnp.ones((8, 8)))
            .lower(lowering_platforms=("tpu",))
            .as_text()
        )
        assert "HIGHEST" in text


@pytest.mark.parametrize("first", [1.0, -1.0, 0.0, np.nan, np.inf, -np.inf])
def test_zeros_are_zeros_whatever_they_wait_for(first: float) -> None:
    zeros = jax.jit(lambda x: zeros_after(x, (3, 2), jnp.float32))(np.full((2, 2), first, np.float32))
    np.testing.assert_array_equal(zeros, np.zeros((3, 2), np.float32))


def test_layers_share_the_memory_of_their_zeros() -> None:
    """With `jnp.zeros` in its place this program takes 16 MiB."""
    size = 1 << 20

    def layer(x: jax.Array, _: int) -> jax.Array:
        def fill(i: jax.Array, buffer: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(buffer, x * 2, (i * 64,))

        return x + jax.lax.fori_loop(0, 3, fill, zeros_after(x, (size,), x.dtype))[-64:]

    program = jax.jit(lambda x: functools.reduce(layer, range(4), x)).lower(jnp.ones(64)).compile()
    analysis = program.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 2 * 4 * size
