"""What every backend is given."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KDAParameters(NamedTuple):
    """The parameters of a KDA layer that stand between its projections.

    Attributes:
        conv: [W, C], the short convolution's taps, the last one for the current token; channels q | k | v.
        A_log: [HV], log of each head's decay rate.
        dt_bias: [HV, K], added to the raw decay.
        norm: [V], weight of the output's RMS norm.
    """

    conv: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array


class Tokens(NamedTuple):
    """Raw projections, [B, ...] of one token a row or [B, M, ...] of M."""

    mixed: jax.Array  # [..., C]
    decay: jax.Array  # [..., HV, K]
    beta: jax.Array  # [..., HV]
    gate: jax.Array  # [..., HV, V]


class Form(NamedTuple):
    """The static choices of a call."""

    heads: int  # H, of queries and keys
    scale: float
    lower_bound: float | None
    eps: float

    def parts(self, mixed: jax.Array, keys: int, values: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys [..., H, K] and values [..., HV, V] out of [..., C]."""
        rows, width = mixed.shape[:-1], self.heads * keys
        q, k, v = jnp.split(mixed, (width, 2 * width), axis=-1)
        q, k = (x.reshape(*rows, self.heads, keys) for x in (q, k))
        return q, k, v.reshape(*rows, -1, values)
