"""What a short convolution must do, by count."""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl


def conv_cost(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array | jax.ShapeDtypeStruct,
    window: jax.Array | jax.ShapeDtypeStruct,
    marked: int,
    activation: str | None,
) -> pl.CostEstimate:
    """x [..., C], weight [W, C], a window [N, W-1, C] in and 1 + `marked` out: each number once."""
    moved = 2 * x.size * x.dtype.itemsize + weight.size * weight.dtype.itemsize
    moved += (2 + marked) * window.size * window.dtype.itemsize
    active = activation is not None
    return pl.CostEstimate(
        flops=(2 * weight.shape[0] - 1 + 3 * active) * x.size,
        transcendentals=x.size * active,
        bytes_accessed=moved,
    )
