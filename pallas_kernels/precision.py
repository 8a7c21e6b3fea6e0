"""In which dtype sums are taken, and the matrix products that take them so, fast for many rows and for few."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

Product: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype to sum values of `dtype` in: float32, or float64 for float64 itself."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def contract(pattern: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two arrays that multiplies in full float32 also where the device's default is coarser."""
    return jnp.einsum(pattern, a, b, precision=jax.lax.Precision.HIGHEST)


FEW_ROWS = 8
"""Up to this many rows, XLA's CPU library takes longer for one product than for a matrix and a vector a row: it copies
the matrix first. 4 rows, 512 x 1796, from memory: 820 against 350 us (JAX 0.10.2), 580 against 310 (0.11.2)."""


def rows_matmul(
    x: jax.Array, matrix: jax.Array, precision: jax.lax.Precision | None = jax.lax.Precision.HIGHEST
) -> jax.Array:
    """x [N, D] @ matrix [D, F], in float32 (or wider) whatever the inputs.

    On a CPU, 2 to `FEW_ROWS` rows of float32 are taken one by one; each then has the bits that it has alone.

    Args:
        precision: full float32 as in `contract`; None leaves it to the device.
    """

    def at_once(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.matmul(x, matrix, precision=precision, preferred_element_type=accumulator(x.dtype))

    def one_by_one(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.stack([row @ matrix for row in _rows(x)])

    return _choose(x, matrix, one_by_one, at_once)


def rows_matmul_t(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """As `contract("nd,fd->nf", x, matrix)`, and for few rows on a CPU as `rows_matmul`."""

    def at_once(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return contract("nd,fd->nf", x, matrix)

    def one_by_one(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.stack([matrix @ row for row in _rows(x)])

    return _choose(x, matrix, one_by_one, at_once)


def _rows(x: jax.Array) -> list[jax.Array]:
    """The rows of x, held apart, or the compiler joins products of one matrix again."""
    return [jax.lax.optimization_barrier(row) for row in x]


def _choose(x: jax.Array, matrix: jax.Array, one_by_one: Product, at_once: Product) -> jax.Array:
    if 1 < x.shape[0] <= FEW_ROWS and x.dtype == matrix.dtype == jnp.float32:
        return jax.lax.platform_dependent(x, matrix, cpu=one_by_one, default=at_once)
    return at_once(x, matrix)
