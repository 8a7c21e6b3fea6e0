"""Public function of the mixture of expert MLPs: checks and choice of backend."""

from __future__ import annotations

import jax

from pallas_kernels.backends import Backend, choose
from pallas_kernels.expert_mlp import reference, xla
from pallas_kernels.expert_mlp.activations import swiglu
from pallas_kernels.expert_mlp.reference import Activation, Matrices
from pallas_kernels.mxfp4 import Mxfp4, unpack_mxfp4
from pallas_kernels.precision import accumulator


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate_up: Matrices,
    w_down: Matrices,
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
        w_gate_up: [E, D, 2I], gate columns first; or `Mxfp4` of [E, 2I, D], which is unpacked expert by expert as it is
            used.
        w_down: [E, I, D], or `Mxfp4` of [E, D, I].
        activation: static, (gate, up) -> hidden, each [rows, I] float32; differentiable.
        implementation: "reference" (every expert on every token), "xla" or None.

    Returns:
        [N, D] in x's dtype; products are summed in float32 (or wider).

    Raises:
        ValueError: shapes do not fit, an unknown name, or a gradient asked for with packed matrices.
    """
    gate_up, down = _in_first(w_gate_up), _in_first(w_down)
    if x.ndim != 2 or len(gate_up) != 3 or len(down) != 3:
        raise ValueError(
            f"expert_mlp: need x [N,D], w_gate_up [E,D,2I], w_down [E,I,D]; got {x.shape}, {gate_up}, {down}"
        )
    num_experts, inner, width = down
    if gate_up != (num_experts, width, 2 * inner) or x.shape[1] != width:
        raise ValueError(
            f"expert_mlp: w_down [E,I,D] = {down} wants w_gate_up {(num_experts, width, 2 * inner)} and "
            f"x [N,{width}], got {gate_up} and {x.shape}"
        )
    if expert_ids.shape != expert_weights.shape or expert_ids.ndim != 2 or len(expert_ids) != len(x):
        raise ValueError(
            f"expert_mlp: expert_ids and expert_weights must be [N,S] with N={len(x)}, "
            f"got {expert_ids.shape} and {expert_weights.shape}"
        )
    backends = {"reference": Backend(_reference), "xla": Backend(xla.mix)}
    run = choose("expert_mlp", implementation, backends)
    return run(x, expert_ids, expert_weights, w_gate_up, w_down, activation).astype(x.dtype)


def _in_first(matrices: Matrices) -> tuple[int, ...]:
    """The shape of matrices as [E, in, out]; packed ones are [E, out, in]."""
    if not isinstance(matrices, Mxfp4):
        return matrices.shape
    return (*matrices.shape[:-2], *matrices.shape[:-3:-1])


def _reference(x, expert_ids, expert_weights, w_gate_up, w_down, activation):
    wide = accumulator(x.dtype)
    w_gate_up, w_down = (
        unpack_mxfp4(a, wide).swapaxes(-1, -2) if isinstance(a, Mxfp4) else a for a in (w_gate_up, w_down)
    )
    x, expert_weights, w_gate_up, w_down = (a.astype(wide) for a in (x, expert_weights, w_gate_up, w_down))
    return reference.mix(x, expert_ids, expert_weights, w_gate_up, w_down, activation)
