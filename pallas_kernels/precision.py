"""In which dtype sums are taken, and the matrix product that takes them so on every device."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype to sum values of `dtype` in: float32, or float64 for float64 itself."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def contract(pattern: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two arrays that multiplies in full float32 also where the device's default is coarser."""
    return jnp.einsum(pattern, a, b, precision=jax.lax.Precision.HIGHEST)
