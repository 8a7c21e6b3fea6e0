"""Public function of the mixture of expert MLPs: checks and choice of backend."""

from __future__ import annotations

import jax

from pallas_kernels.backends import Backend, choose
from pallas_kernels.expert_mlp import reference, xla
from pallas_kernels.expert_mlp.reference import Activation
from pallas_kernels.precision import accumulator


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up."""
    return jax.nn.silu(gate) * up


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: Activation = swiglu,
    implementation: str | None = None,
) -> jax.Array:
    """Adds up, for every token, the weighted outputs of the expert MLPs it was routed to.

    y = sum_s weight_s (act(x W_gate, x W_up) W_down). Only chosen experts cost anything. With more than 16 tokens
    a token's bits do not depend on the others.

    Args:
        x: [N, D] tokens.
        expert_ids: [N, S] int32, the experts of each token; an id outside 0..E-1 (for padding) adds nothing.
        expert_weights: [N, S] float32.
        w_gate_up: [E, D, 2I], gate columns first.
        w_down: [E, I, D].
        activation: static, (gate, up) -> hidden, each [rows, I] float32; differentiable.
        implementation: "reference" (every expert on every token), "xla" or None.

    Returns:
        [N, D] in x's dtype; products are summed in float32 (or wider).

    Raises:
        ValueError: shapes do not fit, or an unknown name.
    """
    if x.ndim != 2 or w_gate_up.ndim != 3 or w_down.ndim != 3:
        raise ValueError(
            f"expert_mlp: need x [N,D], w_gate_up [E,D,2I], w_down [E,I,D]; got {x.shape}, {w_gate_up.shape}, "
            f"{w_down.shape}"
        )
    num_experts, inner, width = w_down.shape
    if w_gate_up.shape != (num_experts, width, 2 * inner) or x.shape[1] != width:
        raise ValueError(
            f"expert_mlp: w_down [E,I,D] = {w_down.shape} wants w_gate_up {(num_experts, width, 2 * inner)} and "
            f"x [N,{width}], got {w_gate_up.shape} and {x.shape}"
        )
    if expert_ids.shape != expert_weights.shape or expert_ids.ndim != 2 or len(expert_ids) != len(x):
        raise ValueError(
            f"expert_mlp: expert_ids and expert_weights must be [N,S] with N={len(x)}, "
            f"got {expert_ids.shape} and {expert_weights.shape}"
        )
    backends = {"reference": Backend(_reference), "xla": Backend(xla.mix)}
    run = choose("expert_mlp", implementation, backends)
    return run(x, expert_ids, expert_weights, w_gate_up, w_down, activation).astype(x.dtype)


def _reference(x, expert_ids, expert_weights, w_gate_up, w_down, activation):
    wide = accumulator(x.dtype)
    x, expert_weights, w_gate_up, w_down = (a.astype(wide) for a in (x, expert_weights, w_gate_up, w_down))
    return reference.mix(x, expert_ids, expert_weights, w_gate_up, w_down, activation)
