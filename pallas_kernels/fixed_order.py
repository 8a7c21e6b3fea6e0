"""Sums whose order is written down, so that a row's bits do not depend on how many rows there are.

XLA orders the additions of a reduction by the size of the whole array; it never reorders separate additions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_vjp
def sum_of_squares(x: jax.Array) -> jax.Array:
    """Sum of x^2 over the last axis, kept with size 1: the upper half is added to the lower one, again and again."""
    total = x * x
    while (width := total.shape[-1]) > 1:
        half = (width + 1) // 2
        upper = jnp.pad(total[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - width)])
        total = total[..., :half] + upper
    return total


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sum_of_squares(x), x


def _backward(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    return (2.0 * cotangent * x,)


sum_of_squares.defvjp(_forward, _backward)
