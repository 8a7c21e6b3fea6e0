"""The public KDA operators: checks, defaults, choice of backend."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import Backend, choose
from pallas_kernels.counts import Counts, as_counts, as_slots
from pallas_kernels.kda import pallas, reference, tpu, triton, xla
from pallas_kernels.kda.arguments import check_sequence, make_pack, ready_gate
from pallas_kernels.kda.gate import Gate
from pallas_kernels.kda.prelude import Prelude, prepare
from pallas_kernels.kda.reference import Pack

Array = jax.Array | np.ndarray


def kda_prefill(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    gate: Gate | None = None,
    cu_seqlens: Counts | None = None,
    start: Counts | None = None,
    lengths: Counts | None = None,
    boundaries: Counts | None = None,
    gate_lower_bound: float | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, *tuple[jax.Array, ...]]:
    """Kimi Delta Attention over a sequence: S <- Diag(exp g) S; S <- S + beta k (v - S^T k)^T; o = S^T (scale q).

    All arithmetic on the state is float32. The result for a token never depends on later tokens (if they are finite: a
    NaN can reach the tokens before it in its chunk), nor on other rows of the batch, to the bit. Chunks are counted
    from token 0 of each sequence, so calls cut on multiples of `chunk_size` give the bits of one call.

    Args:
        q, k: [B, T, H, K], float32 or bfloat16, used as given unless `qk_l2norm`.
        v: [B, T, HV, V]; HV is a multiple of H, and value head i reads query and key head i // (HV // H).
        g: log decay, float32, [B, T, HV, K], <= 0; -inf forgets everything. With `gate` the raw projection, any float
            dtype.
        beta: write strength, [B, T, HV], in 0..1 (2 with negative eigenvalues allowed).
        state: float32 [B, HV, K, V]; [N, HV, K, V] with `cu_seqlens`; None is zeros.
        scale: multiplies q, a static number; default K ** -0.5.
        qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6) first. Kernels that do so on the way in do not round
            what they divide to q's dtype.
        gate: take the log decay from g here, as `kda_gate` does. With its `lower_bound` g needs no other promise.
        cu_seqlens: [N + 1] int32, non-decreasing, from 0: sequence n is tokens [cu[n], cu[n+1]) of a batch of one.
            Sequences may be empty, tokens behind the last one are padding.
        start: [B] ([N]) int32: tokens the state has absorbed before this call; None means none (or a multiple of the
            chunk). Anchors the chunks at token 0 of the sequence: the first chunk of the call is then the partial one.
        lengths: [B] int32: tokens of each row that count; the rest is padding, which changes no state and gives 0.
        boundaries: [NB] or [B, NB] ([N, NB]) int32, token counts of this call in 0..T: also return the state there.
        gate_lower_bound: a promise that g >= this static number (K3: -5.0). Down to -5 it allows a faster form; with
            smaller g the result is then undefined.
        chunk_size: 16, 32 or 64 tokens; None lets the backend choose.
        implementation: "reference" (token by token), "xla", "triton" or "tpu" (Pallas kernels for NVIDIA GPUs and for
            TPUs, gradients included), "triton-interpret" or "tpu-interpret" (their bodies step by step, on any device),
            or None, which is "xla".

    Returns:
        out [B, T, HV, V] in v.dtype, final state float32 [B, HV, K, V] ([N, ...]), and with `boundaries` the states
        there, float32 [B, NB, HV, K, V] ([N, NB, ...]).

    Raises:
        ValueError: shapes or options that do not fit, with the numbers; a backend's refusal with its reason.
        NotImplementedError: differentiating a call that has `boundaries`.

    Source: Kimi Linear, arXiv:2510.26692, equations 1 and 8 to 10; semantics of fla 0.4 `chunk_kda`.
    """
    q, k, v, g, beta = map(jnp.asarray, (q, k, v, g, beta))
    state = None if state is None else jnp.asarray(state)
    gate = ready_gate(g, gate)
    batch, tokens, value_heads, values = check_sequence(q, k, v, g, beta, gated=gate is not None)
    pack = make_pack(batch, tokens, cu_seqlens, start, lengths)
    sequences = batch if cu_seqlens is None or pack is None else pack.first.shape[0]
    shape = (sequences, value_heads, q.shape[-1], values)
    if state is None:
        state = jnp.zeros(shape, jnp.float32)
    elif state.shape != shape:
        raise ValueError(
            f"state must be [{'N' if cu_seqlens is not None else 'B'}, HV, K, V] = {shape}, got {state.shape}"
        )
    elif state.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"the state is kept in float32, got {state.dtype}; cast it, knowing what was lost")
    if chunk_size not in (None, 16, 32, 64):
        raise ValueError(f"{chunk_size=} must be 16, 32 or 64, or None")
    if gate_lower_bound is not None and not gate_lower_bound < 0:
        raise ValueError(f"{gate_lower_bound=} must be negative; None promises nothing")
    at = None if boundaries is None else as_counts("boundaries", boundaries, (sequences, -1), limit=tokens)

    run = choose(
        "kda_prefill",
        implementation,
        {
            "xla": Backend(functools.partial(_prepared, xla.prefill), _xla_refusal(q, v, state)),
            **_pallas_backends(state),
            "reference": Backend(functools.partial(_prepared, _reference_prefill)),
        },
    )
    if q.size == 0:  # no backend need know of calls without a token
        marked = () if at is None else (jnp.repeat(state[:, None], at.shape[1], axis=1),)
        return jnp.zeros(v.shape, v.dtype), state, *marked
    prelude, scale = Prelude(qk_l2norm, gate), _scale(q, scale)
    if gate_lower_bound is None and gate is not None:
        gate_lower_bound = gate.lower_bound
    out, final, states = run(q, k, v, g, beta, state, prelude, pack, at, scale, gate_lower_bound, chunk_size)
    return (out, final) if boundaries is None else (out, final, states)


def kda_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    slots: Counts | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    gate: Gate | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of `kda_prefill` for a batch.

    Args:
        q, k: [B, H, K]; v: [B, HV, V]; g: [B, HV, K]; beta: [B, HV]; dtypes as in `kda_prefill`.
        state: float32 [B, HV, K, V], a state a row; with `slots` a pool of them, [S, HV, K, V].
        slots: [B] int32, each row's place in the pool, no place twice; a negative one marks a row of padding, which
            changes nothing and gives 0.
        scale, qk_l2norm, gate, implementation: as in `kda_prefill`.

    Returns:
        out [B, HV, V] in v.dtype and the new state (the whole pool; donate it, and it is written in place). Equal to a
        prefill of one token within rounding, not to the bit.

    Raises:
        ValueError: shapes that do not fit; known slots that are not in the pool or come twice.
    """
    q, k, v, g, beta, state = map(jnp.asarray, (q, k, v, g, beta, state))
    gate = ready_gate(g, gate)
    batch, _, value_heads, values = check_sequence(
        *(x[:, None] for x in (q, k, v, g, beta)), gated=gate is not None
    )
    shape = (batch if slots is None else state.shape[0], value_heads, q.shape[-1], values)
    if state.shape != shape:
        raise ValueError(
            f"state must be [{'B' if slots is None else 'S'}, HV, K, V] = {shape}, got {state.shape}"
        )
    places = None if slots is None else as_slots("slots", slots, batch, state.shape[0])
    run = choose(
        "kda_step",
        implementation,
        {
            "xla": Backend(functools.partial(_step_at, xla.step)),
            **{
                name + suffix: Backend(functools.partial(run, interpret=interpret), pallas.refusal(state))
                for name, run in (("triton", triton.step), ("tpu", tpu.step))
                for suffix, interpret in (("", False), ("-interpret", True))
            },
            "reference": Backend(functools.partial(_step_at, reference.update)),
        },
    )
    if batch == 0:  # no backend need know of it
        return jnp.zeros(v.shape, v.dtype), state
    q, k, g = prepare(Prelude(qk_l2norm, gate), q, k, g)
    work = state.dtype
    q = q.astype(work) * _scale(q, scale)
    out, new = run(q, *(x.astype(work) for x in (k, v, g, beta)), state, places)
    return out.astype(v.dtype), new


def _pallas_backends(state: jax.Array) -> dict[str, Backend]:
    """The kernels' backends of `kda_prefill`, each also step by step on any device."""
    kernels = {
        "triton": pallas.Kernels(triton.forward, triton.backward, triton.fused),
        "tpu": pallas.Kernels(tpu.forward, tpu.backward),
    }
    return {
        name + suffix: Backend(functools.partial(pallas.prefill, each, interpret), pallas.refusal(state))
        for name, each in kernels.items()
        for suffix, interpret in (("", False), ("-interpret", True))
    }


def _prepared(run: Callable[..., pallas.Results], q, k, v, g, beta, states, prelude, *rest) -> pallas.Results:
    """A backend of `kda_prefill` that is handed what is ready."""
    q, k, g = prepare(prelude, q, k, g)
    return run(q, k, v, g, beta, states, *rest)


def _step_at(
    update: Callable[..., tuple[jax.Array, jax.Array]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    slots: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """`update` on the rows' own states, or on those at `slots` of a pool."""
    if slots is None:
        return update(q, k, v, g, beta, state)
    place = jnp.where(slots < 0, state.shape[0], slots)
    out, new = update(q, k, v, g, beta, state.at[place].get(mode="fill", fill_value=0))
    return jnp.where((slots < 0)[:, None, None], 0, out), state.at[place].set(new, mode="drop")


def _scale(q: jax.Array, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _xla_refusal(q, v, state) -> str | None:
    if state.dtype != jnp.float32:
        return f"computes in float32, got a {state.dtype} state"
    if q.shape[-1] < 1 or v.shape[-1] < 1:
        return f"needs channels, got K={q.shape[-1]}, V={v.shape[-1]}"
    return None


def _reference_prefill(q, k, v, g, beta, states, pack, boundaries, scale, gate_lower_bound, chunk_size):
    del gate_lower_bound, chunk_size  # the definition needs neither a promise nor a grid
    batch, tokens = q.shape[:2]
    if pack is None:
        rows = jnp.arange(batch, dtype=jnp.int32)
        pack = Pack(rows * tokens, jnp.full_like(rows, tokens), jnp.zeros_like(rows))
    shape, dtype = v.shape, v.dtype
    q, k, v, g, beta = (
        x.astype(states.dtype).reshape(batch * tokens, *x.shape[2:]) for x in (q, k, v, g, beta)
    )
    out, final, at = reference.recurrence(q * scale, k, v, g, beta, states, pack, boundaries)
    return out.reshape(shape).astype(dtype), final, at
