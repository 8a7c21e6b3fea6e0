"""Matrices in MXFP4: numbers of four bits, and one power of two for every 32 of them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BLOCK = 32
"""Columns that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen codes stand for (E2M1: a sign, two bits of exponent, one of mantissa)."""


class Mxfp4(NamedTuple):
    """Matrices [..., F, D], packed along D.

    Attributes:
        packed: uint8 [..., F, D/2], two codes a byte, the even column in the low half.
        scale: uint8 [..., F, D/32] (E8M0): s stands for 2^(s - 127). 255 stands for no number.

    Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3; compressed-tensors' `mxfp4-pack-quantized` for
        the order in a byte.
    """

    packed: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices themselves, [..., F, D]."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])


def unpack_mxfp4(matrices: Mxfp4, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Writes the numbers out, [..., F, D].

    Args:
        matrices: leaves uint8 [..., F, D/2] and [..., F, D/32].
        dtype: of the result. bfloat16 and wider types hold every number but those below 2^-126, which are zeros on
            most devices; scale 0 (2^-127) makes zeros on all.

    Raises:
        ValueError: the leaves do not fit each other, or are not uint8.
    """
    packed, scale = matrices
    wanted = (*packed.shape[:-1], 2 * packed.shape[-1] // BLOCK)
    if packed.dtype != jnp.uint8 or scale.dtype != jnp.uint8:
        raise ValueError(
            f"unpack_mxfp4: packed and scale must be uint8, got {packed.dtype} and {scale.dtype}"
        )
    if 2 * packed.shape[-1] % BLOCK or scale.shape != wanted:
        raise ValueError(
            f"unpack_mxfp4: packed [..., F, D/2] = {packed.shape} wants D a multiple of {BLOCK} and scale {wanted}, "
            f"got {scale.shape}"
        )
    values = jnp.asarray(VALUES, dtype)
    low, high = (values.at[code].get(mode="promise_in_bounds") for code in (packed & 15, packed >> 4))
    blocks = jnp.stack((low, high), axis=-1).reshape(*scale.shape, BLOCK)
    power = jax.lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)
    return (blocks * power.astype(dtype)[..., None]).reshape(matrices.shape)
