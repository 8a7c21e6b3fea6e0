"""The public operators: checks, defaults, choice of backend."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import Backend, choose
from pallas_kernels.counts import Counts, as_counts, as_slots
from pallas_kernels.kda_decode import reference, triton, xla
from pallas_kernels.kda_decode.inputs import Form, KDAParameters, Tokens
from pallas_kernels.kda_decode.slots import decode, draft, put

Array = jax.Array | np.ndarray


def kda_decode(
    mixed: Array,
    decay: Array,
    beta: Array,
    gate: Array,
    layer: KDAParameters,
    states: Array,
    windows: Array,
    *,
    eps: float,
    lower_bound: float | None = None,
    slots: Counts | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token of each row through a KDA layer, from its projections to its gated output: `short_conv_step`,
    `kda_gate`, `l2_normalize`, `kda_step` and `rms_norm_gated` in one.

    Args:
        mixed: [B, C] raw q | k | v, before the convolution; C = 2 H K + HV V, with HV a multiple of H.
        decay: [B, HV, K] raw decays, before `kda_gate`.
        beta: [B, HV] raw write strengths, before the sigmoid.
        gate: [B, HV, V] raw output gates, before the sigmoid.
        layer: the parameters.
        states: float32 [B, HV, K, V], a state a row; with `slots` a pool of them, [S, HV, K, V].
        windows: [B, W-1, C] the inputs before this token, oldest first; with `slots` a pool, [S, W-1, C].
        eps: of the output's norm, added to the mean square.
        lower_bound: None for Kimi Linear's gate, a negative number for K3's; see `kda_gate`.
        slots: [B] int32, each row's place in both pools, no place twice; a negative one marks a row of padding, which
            reads and writes nothing and gives zeros.
        scale: multiplies the queries, a static number; default K ** -0.5.
        implementation: "reference", "xla", "triton" (one Pallas kernel for NVIDIA GPUs), "triton-interpret" (its body
            step by step, on any device), or None, which is "xla".

    Returns:
        out [B, HV, V] in the dtype of `mixed`, and the states and windows behind the token (the whole pools; donate
        them, and they are written in place). "triton" rounds to that dtype once, "xla" between the operators too.

    Raises:
        ValueError: shapes or slots that do not fit, with the numbers; a backend's refusal with its reason.

    Source: Kimi Linear, arXiv:2510.26692, section 4; transformers 5.24 `KimiLinearDeltaAttention`.
    """
    x = Tokens(*map(jnp.asarray, (mixed, decay, beta, gate)))
    layer, states, windows = (
        KDAParameters(*map(jnp.asarray, layer)),
        jnp.asarray(states),
        jnp.asarray(windows),
    )
    form, places = _check("kda_decode: ", 1, x, layer, states, windows, slots, scale, lower_bound, eps)
    run = _choose(
        "kda_decode", implementation, decode, triton.decode, triton.refusal(x, layer, states, windows)
    )
    if not x.mixed.size:  # no backend need know of calls without a row
        return jnp.zeros(x.gate.shape, x.mixed.dtype), states, windows
    return run(x, layer, states, windows, places, form)


def kda_draft(
    mixed: Array,
    decay: Array,
    beta: Array,
    gate: Array,
    layer: KDAParameters,
    states: Array,
    windows: Array,
    *,
    eps: float,
    lower_bound: float | None = None,
    slots: Counts | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """M tokens of each row of which it is not known yet how many count: what as many calls of `kda_decode` give, with
    what follows each token kept and the pools left alone. `kda_accept` then moves the pools on.

    Args:
        mixed, decay, beta, gate: [B, M, ...] with M >= 1, else as in `kda_decode`.
        layer, states, windows, eps, lower_bound, slots, scale, implementation: as in `kda_decode`.

    Returns:
        out [B, M, HV, V] in the dtype of `mixed`, the states after each token, float32 [B, M, HV, K, V], and
        the windows after each, [B, M, W-1, C] in the dtype of `windows`; zeros in rows of padding.

    Raises:
        ValueError: as `kda_decode`.
    """
    x = Tokens(*map(jnp.asarray, (mixed, decay, beta, gate)))
    layer, states, windows = (
        KDAParameters(*map(jnp.asarray, layer)),
        jnp.asarray(states),
        jnp.asarray(windows),
    )
    form, places = _check("kda_draft: ", 2, x, layer, states, windows, slots, scale, lower_bound, eps)
    run = _choose("kda_draft", implementation, draft, triton.draft, triton.refusal(x, layer, states, windows))
    if not x.mixed.size:
        after_states, after_windows = (
            jnp.zeros((*x.mixed.shape[:2], *pool.shape[1:]), pool.dtype) for pool in (states, windows)
        )
        return jnp.zeros(x.gate.shape, x.mixed.dtype), after_states, after_windows
    return run(x, layer, states, windows, places, form)


def kda_accept(
    states: Array,
    windows: Array,
    after_states: Array,
    after_windows: Array,
    accepted: Counts,
    *,
    slots: Counts | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Moves each row on by the drafts of it that count, by choosing among what `kda_draft` kept.

    Args:
        states, windows: what `kda_draft` was given.
        after_states, after_windows: what it gave: [B, M, HV, K, V] and [B, M, W-1, C].
        accepted: [B] int32 in 0..M, tokens of each row that count; 0 leaves the row as it was.
        slots: as `kda_draft` had them.

    Returns:
        The states and the windows (the whole pools; donate them, and they are written in place).

    Raises:
        ValueError: shapes, counts or slots that do not fit.
    """
    states, windows, after_states, after_windows = map(
        jnp.asarray, (states, windows, after_states, after_windows)
    )
    lead = after_states.shape[:2]
    for name, after, pool in (("states", after_states, states), ("windows", after_windows, windows)):
        if after.shape != (*lead, *pool.shape[1:]):
            raise ValueError(
                f"kda_accept: after_{name} must be [B, M, ...] = {(*lead, *pool.shape[1:])}, got {after.shape}"
            )
    accepted = as_counts("kda_accept: accepted", accepted, lead[:1], limit=lead[1])
    places = _slots("kda_accept: ", slots, lead[0], states.shape[0])
    places = jnp.arange(lead[0], dtype=jnp.int32) if places is None else places
    places, last = jnp.where(accepted == 0, -1, places), jnp.maximum(accepted - 1, 0)
    rows = jnp.arange(lead[0], dtype=jnp.int32)
    return put(states, places, after_states[rows, last]), put(windows, places, after_windows[rows, last])


def _choose(
    op: str,
    implementation: str | None,
    each: Callable,
    kernel: Callable,
    refusal: str | None,
) -> Callable:
    """The backend: `each` moves rows on by a token's function, `kernel` is the same as a kernel unless it refuses."""
    backends = {
        "xla": Backend(functools.partial(each, xla.token)),
        "triton": Backend(functools.partial(kernel, interpret=False), refusal),
        "triton-interpret": Backend(functools.partial(kernel, interpret=True), refusal),
        "reference": Backend(functools.partial(each, reference.token)),
    }
    return choose(op, implementation, backends)


def _check(
    op: str,
    axes: int,
    x: Tokens,
    layer: KDAParameters,
    states: jax.Array,
    windows: jax.Array,
    slots: Counts | None,
    scale: float | None,
    lower_bound: float | None,
    eps: float,
) -> tuple[Form, jax.Array | None]:
    """The static choices and the slots, or says what does not fit; `axes` stand before the channels."""
    lead, letters = x.mixed.shape[:-1], ("B", "B, M")[axes - 1]
    if len(lead) != axes:
        raise ValueError(f"{op}mixed must be [{letters}, C], got {x.mixed.shape}")
    if lead[-1:] == (0,) and axes == 2:
        raise ValueError(f"{op}needs a token a row at least, got M=0")
    if states.ndim != 4 or states.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"{op}states must be [S, HV, K, V] in float32, got {states.shape} in {states.dtype}")
    size, value_heads, keys, values = states.shape
    channels, taps = x.mixed.shape[-1], layer.conv.shape[0]
    heads = (channels - value_heads * values) // (2 * keys)
    if heads < 1 or channels != 2 * heads * keys + value_heads * values or value_heads % heads:
        raise ValueError(
            f"{op}mixed must have C = 2 H K + HV V channels, HV a multiple of H, with HV={value_heads}, K={keys}, "
            f"V={values} of the states, got C={channels}"
        )
    for name, array, axes_of, shape in (
        ("decay", x.decay, f"{letters}, HV, K", (*lead, value_heads, keys)),
        ("beta", x.beta, f"{letters}, HV", (*lead, value_heads)),
        ("gate", x.gate, f"{letters}, HV, V", (*lead, value_heads, values)),
        ("layer.conv", layer.conv, "W, C", (taps, channels)),
        ("layer.A_log", layer.A_log, "HV", (value_heads,)),
        ("layer.dt_bias", layer.dt_bias, "HV, K", (value_heads, keys)),
        ("layer.norm", layer.norm, "V", (values,)),
        ("windows", windows, "S, W-1, C", (size, taps - 1, channels)),
    ):
        if array.shape != shape:
            raise ValueError(f"{op}{name} must be [{axes_of}] = {shape}, got {array.shape}")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{op}{lower_bound=} must be negative; None chooses the unbounded gate")
    form = Form(heads, keys**-0.5 if scale is None else float(scale), lower_bound, eps)
    return form, _slots(op, slots, lead[0], size)


def _slots(op: str, slots: Counts | None, rows: int, size: int) -> jax.Array | None:
    """int32 [B], checked where they are known (outside jit)."""
    if slots is None:
        if size != rows:
            raise ValueError(
                f"{op}states are those of B={rows} rows without slots, got {size}; name the rows' slots"
            )
        return None
    return as_slots(f"{op}slots", slots, rows, size)
