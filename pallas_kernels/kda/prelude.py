"""What stands before the recurrence: a backend's kernels do it on the way in, or are handed what is ready."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gate import Gate, kda_gate, l2_normalize


class Prelude(NamedTuple):
    """What a call asks for.

    Attributes:
        qk_l2norm: q and k are divided by their norms first.
        gate: g is the raw projection that this gate is taken of; None when it is the log decay.
    """

    qk_l2norm: bool = False
    gate: Gate | None = None


def prepare(
    prelude: Prelude, q: jax.Array, k: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Does it in plain JAX.

    Args:
        prelude: what to do.
        q, k: [..., H, K]; g: [..., HV, K].

    Returns:
        q and k [..., HV, K] in their dtype, for value head i those of head i // (HV // H), and the log decay, float32
        where a gate was taken.
    """
    if prelude.qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    repeats = g.shape[-2] // q.shape[-2]
    if repeats > 1:
        q, k = (jnp.repeat(x, repeats, axis=-2) for x in (q, k))
    if prelude.gate is not None:
        g = kda_gate(g, prelude.gate.A_log, prelude.gate.dt_bias, lower_bound=prelude.gate.lower_bound)
    return q, k, g
