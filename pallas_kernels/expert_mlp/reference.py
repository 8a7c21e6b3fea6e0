"""The definition of the mixture of expert MLPs: every expert on every token."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.precision import contract

Activation = Callable[[jax.Array, jax.Array], jax.Array]
Matrices = jax.Array | Mxfp4
"""One matrix an expert: [E, in, out], or packed and [E, out, in]."""


def mix(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    activation: Activation,
) -> jax.Array:
    """y = sum_s weight_s (act(x W_gate, x W_up) W_down), with the matrices of expert s.

    Args:
        x: [N, D] in the dtype to compute in, like the matrices.
        expert_ids: [N, S] int32; an id outside 0..E-1 adds nothing.
        expert_weights: [N, S].
        w_gate_up: [E, D, 2I], gate columns first.
        w_down: [E, I, D].
        activation: (gate, up) -> hidden.

    Returns:
        [N, D].
    """
    gate, up = jnp.split(contract("nd,edi->eni", x, w_gate_up), 2, axis=-1)
    every = contract("eni,eid->end", activation(gate, up), w_down)
    chosen = jax.nn.one_hot(expert_ids, w_down.shape[0], dtype=x.dtype)  # [N, S, E]
    share = contract("nse,ns->en", chosen, expert_weights)
    return contract("en,end->nd", share, every)
