"""The definition of the compressed state, and the arithmetic that every backend shares.

A scale has 17 significant bits and a value has 7, so their product is exact in float32. That makes what is compressed
the same bits on every device, however it divides, and makes it stay as it is when it is compressed again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LARGEST = 127
"""The largest value; -128 is not used."""

SMALLEST_SCALE = 2.0**-100
"""A row that would need a smaller one is a row of zeros: devices differ in what they do below 2^-126."""

LARGEST_SCALE = 2.0**120
"""A number that would need a larger one counts as infinite: its scale, rounded up, times 127 might be."""

DROPPED = 7  # bits of a float32's 24 that a scale does without


class CompressedState(NamedTuple):
    """States in int8.

    Attributes:
        values: int8 [..., H, K, V], from -127 to 127.
        scales: float32 [..., H, K], by which a key channel's values are multiplied; 0 where all are 0, NaN where a
            number was not finite.
    """

    values: jax.Array
    scales: jax.Array


def compress(rows: jax.Array) -> CompressedState:
    """Rows float32 [..., V] in int8: values [..., V] and scales [...].

    The scale is the largest magnitude by 127, rounded up to 17 bits; a value is x / scale, ties to even.
    """
    size = jnp.abs(rows)
    size = jnp.where(size <= LARGEST * LARGEST_SCALE, size, jnp.inf)  # NaN as well: it is not less
    scale = _scale(jnp.max(size, axis=-1))
    holds = (scale >= SMALLEST_SCALE) & (scale < jnp.inf)
    step = jnp.where(holds, scale, 1.0)[..., None]
    x = jnp.where(holds[..., None], rows, 0.0)
    near = jnp.floor(x * (1.0 / step) + 0.5)  # this value or a neighbour of it
    rest, half = x - near * step, 0.5 * step  # exact
    odd = jnp.floor(0.5 * near) * 2.0 != near
    up = (rest > half) | (odd & (rest == half))
    down = (rest < -half) | (odd & (rest == -half))
    values = near + jnp.where(up, 1.0, 0.0) - jnp.where(down, 1.0, 0.0)
    missing = jnp.where(scale < jnp.inf, 0.0, jnp.nan)
    return CompressedState(values.astype(jnp.int8), jnp.where(holds, scale, missing))


def decompress(compressed: CompressedState) -> jax.Array:
    """values [..., V] times scales [...], float32; exact."""
    return compressed.values.astype(jnp.float32) * compressed.scales[..., None]


def _scale(largest: jax.Array) -> jax.Array:
    """The smallest number of 17 significant bits that is no less than largest / 127; infinity stays."""
    quotient = largest * (1.0 / LARGEST)
    bits = jax.lax.bitcast_convert_type(quotient, jnp.int32)
    bits = (bits >> DROPPED) << DROPPED
    for _ in range(2):  # the quotient's own rounding may have hidden one more
        short = jax.lax.bitcast_convert_type(bits, jnp.float32) * LARGEST < largest
        bits = jnp.where(short, bits + (1 << DROPPED), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
