"""Root-mean-square normalisation, plain and gated."""

from __future__ import annotations

import jax

from pallas_kernels.fixed_order import sum_of_squares
from pallas_kernels.precision import accumulator


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Scales each row to unit mean square: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., C].
        weight: [C].
        eps: added to the mean square.

    Returns:
        [..., C] in x's dtype; float32 (or wider) inside.

    Raises:
        ValueError: weight is not [C].

    Source:
        Zhang and Sennrich, arXiv:1910.07467, equation 4.
    """
    return _normalise(x, weight, eps).astype(x.dtype)


def rms_norm_gated(x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Normalises first and gates after: rms_norm(x) * weight * sigmoid(gate), all in float32 (or wider).

    Args:
        x: [..., C].
        gate: the shape of x, raw (before the sigmoid).
        weight: [C].
        eps: added to the mean square.

    Returns:
        [..., C] in x's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    if gate.shape != x.shape:
        raise ValueError(f"rms_norm_gated: {gate.shape=} must equal {x.shape=}")
    normal = _normalise(x, weight, eps)
    return (normal * jax.nn.sigmoid(gate.astype(normal.dtype))).astype(x.dtype)


def _normalise(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: {weight.shape=} must be the last axis of {x.shape=}")
    wide = x.astype(accumulator(x.dtype))
    scale = jax.lax.rsqrt(sum_of_squares(wide) / x.shape[-1] + eps)
    return wide * scale * weight.astype(wide.dtype)
