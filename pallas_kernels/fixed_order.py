"""Sums whose order is written down, so that a row's bits do not depend on the program around it.

XLA orders the additions of a reduction by the size of the whole array and by what it is fused with; it never reorders
separate additions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MIN_ROWS = 64
"""From this many rows on, XLA's CPU products give a row the same bits for any number of rows."""


@jax.custom_vjp
def row_dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Sum of x * y over the last axis, kept with size 1: the upper half is added to the lower one, again and again.

    Args:
        x, y: [..., C] of one shape and dtype.

    Returns:
        [..., 1] in their dtype.
    """
    total = x * y
    while (width := total.shape[-1]) > 1:
        half = (width + 1) // 2
        upper = jnp.pad(total[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - width)])
        total = total[..., :half] + upper
    return total


def _forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return row_dot(x, y), (x, y)


def _backward(inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = inputs
    return cotangent * y, cotangent * x


row_dot.defvjp(_forward, _backward)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """`row_dot` of x [..., C] with itself, [..., 1]."""
    return row_dot(x, x)
