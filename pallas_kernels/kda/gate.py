"""What a KDA layer does to its raw projections before the recurrence: the decay gate and the L2 norm."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_order import sum_of_squares

NORM_EPS = 1e-6
"""Stands under the L2 norm's root."""


class Gate(NamedTuple):
    """What `kda_gate` takes beside its raw projections, for operators that take the gate themselves.

    Attributes:
        A_log: log of the decay rate of each value head, [HV], any float dtype.
        dt_bias: [HV, K], any float dtype; None adds nothing.
        lower_bound: None for Kimi Linear's gate; a negative number, known when the program is made, for K3's.
    """

    A_log: jax.Array
    dt_bias: jax.Array | None = None
    lower_bound: float | None = None


def kda_gate(
    z: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array | None = None,
    *,
    lower_bound: float | None = None,
) -> jax.Array:
    """Turns raw gate projections into log decays.

    Args:
        z: raw projections, any float dtype, [..., H, K].
        A_log: log of the decay rate of each head, [H].
        dt_bias: added to `z`, [H, K]; None adds nothing.
        lower_bound: None for Kimi Linear's gate, `-exp(A_log) * softplus(z + dt_bias)`, which has no bound;
            a negative number for K3's, `lower_bound * sigmoid(exp(A_log) * (z + dt_bias))`. The second is
            another function, not the first one clipped.

    Returns:
        Log decays g <= 0 (> lower_bound), float32, [..., H, K]: a step multiplies the state by exp(g).

    Raises:
        ValueError: the shapes do not belong together, or `lower_bound` is not negative.

    Source: Kimi Linear (arXiv:2510.26692), section 3; flash-linear-attention 0.4, `fla/ops/kda/gate.py`.
    """
    check_gate(z, Gate(A_log, dt_bias, lower_bound))
    z = z.astype(jnp.float32)
    if dt_bias is not None:
        z = z + dt_bias.astype(jnp.float32)
    return log_decay(z, jnp.exp(A_log.astype(jnp.float32))[:, None], lower_bound)


def check_gate(z: jax.Array, gate: Gate) -> None:
    """Raises a ValueError that says what is wrong with a gate for raw projections z [..., H, K], if anything is."""
    heads, channels = z.shape[-2:]
    A_log, dt_bias, lower_bound = gate
    if A_log.shape != (heads,):
        raise ValueError(f"A_log must be [H] = [{heads}] for z of {z.shape}, got {A_log.shape}; reshape it")
    if dt_bias is not None and dt_bias.shape != (heads, channels):
        raise ValueError(f"dt_bias must be [H, K] = [{heads}, {channels}], got {dt_bias.shape}; reshape it")
    if isinstance(lower_bound, jax.Array):
        raise ValueError(
            f"lower_bound must be a number or None, got {lower_bound}; make the Gate inside the jitted function"
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{lower_bound=} must be negative (K3 has -5.0); None chooses the unbounded gate")


def log_decay(z: jax.Array, rate: jax.Array, lower_bound: float | None) -> jax.Array:
    """`kda_gate` element by element: of float32 z with its bias, and exp(A_log)."""
    return -rate * jax.nn.softplus(z) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * z)


def l2_normalize(x: jax.Array, eps: float = NORM_EPS) -> jax.Array:
    """Divides the last axis by sqrt(sum of squares + eps); float32 inside, returns x.dtype, same shape.

    `eps` stands inside the root, as in fla's kernels (`max(norm, eps)` is another function).
    """
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(sum_of_squares(y) + eps)).astype(x.dtype)
