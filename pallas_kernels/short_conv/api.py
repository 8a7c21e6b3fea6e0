"""Public functions of the short causal depthwise convolution: checks, dtypes, choice of backend."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend, choose
from pallas_kernels.counts import Counts, as_counts, as_cu_seqlens
from pallas_kernels.precision import accumulator
from pallas_kernels.short_conv import pallas, reference, tpu, triton, xla


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: Counts | None = None,
    lengths: Counts | None = None,
    boundaries: Counts | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Causal depthwise convolution over tokens, with the last inputs carried from call to call.

    y[t] = activation(sum_j weight[j] * input[t - (W-1) + j]). The taps are added oldest first, one channel
    at a time, so a sequence gives the same bits however it is cut into calls. Any T from 1 up, also T < W-1.

    Args:
        x: [B, T, C] inputs.
        weight: [W, C]; the last tap meets the current token. (An HF weight [C, 1, W] is `weight[:, 0].T`.)
        window: [B, W-1, C] the inputs before x, oldest first, before activation; zeros when None. With
            `cu_seqlens` one a sequence: [N, W-1, C].
        activation: "silu" or None.
        cu_seqlens: [N+1] int32: B is 1 and sequence n is tokens cu_seqlens[n] .. cu_seqlens[n+1]-1. Sequences
            may be empty; tokens from cu_seqlens[N] on are padding.
        lengths: [B] int32 valid tokens a row; the rest is padding, which gives 0 and enters no window.
            Not with `cu_seqlens`.
        boundaries: [NB] or [B, NB] ([N, NB] with `cu_seqlens`) int32 token counts of this call, by row or by
            sequence, at which the window is also returned; counts past the end give the window at the end.
        implementation: "reference", "xla", "triton" or "tpu" (Pallas kernels for NVIDIA GPUs and, without packs, for
            TPUs, whose gradients are those of "xla"), "triton-interpret" or "tpu-interpret" (their bodies step by
            step, on any device), or None, which is "xla".

    Returns:
        y [B, T, C] in x's dtype (sums are in float32 at least); the window after the last valid token, in the
        dtype of `window` (x's when None); with `boundaries` also the windows there,
        [B, NB, W-1, C] ([N, ...]).

    Raises:
        ValueError: shapes or counts do not fit, both `cu_seqlens` and `lengths` are given, or an unknown
            name; a backend's refusal with its reason.
    """
    _check_weight(x, weight, activation)
    batch, num_tokens, _ = x.shape
    pack = None
    if cu_seqlens is not None:
        if batch != 1 or lengths is not None:
            raise ValueError(f"short_conv: cu_seqlens wants B=1 without lengths, got B={batch}, {lengths=}")
        pack = as_cu_seqlens("short_conv: cu_seqlens", cu_seqlens, num_tokens)
    rows = batch if pack is None else pack.shape[0] - 1
    start = _window(x, weight, window, rows)
    marks = [] if boundaries is None else boundaries
    marks = as_counts("short_conv: boundaries", marks, (rows, -1), limit=num_tokens)

    counts = pack
    if counts is None:
        valid = [num_tokens] * batch if lengths is None else lengths
        counts = as_counts("short_conv: lengths", valid, (batch,), limit=num_tokens)
    run = choose("short_conv", implementation, _backends(x, weight, start, pack is not None))
    if x.size == 0:  # no backend need know of calls without a token
        result = jnp.zeros_like(x), start, jnp.repeat(start[:, None], marks.shape[1], axis=1)
    elif pack is None:
        result = run(x, weight, start, counts, marks, activation)
    else:
        y, *windows = run(x[0], weight, start, counts, marks, activation)
        result = y[None], *windows
    return result[:2] if boundaries is None else result


def short_conv_step(
    x: jax.Array, weight: jax.Array, window: jax.Array, *, activation: str | None = "silu"
) -> tuple[jax.Array, jax.Array]:
    """Convolves one token a row: what `short_conv` does with T = 1, to the bit.

    Args:
        x: [B, C] inputs of this token.
        weight: [W, C], last tap for this token.
        window: [B, W-1, C] the inputs before it, oldest first.
        activation: "silu" or None.

    Returns:
        y [B, C] in x's dtype, and the next window in the old one's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    _check_weight(x[:, None], weight, activation)
    window = _window(x[:, None], weight, window, x.shape[0])
    compute = accumulator(x.dtype)
    y, following = xla.step(x.astype(compute), weight.astype(compute), window.astype(compute), activation)
    return y.astype(x.dtype), following.astype(window.dtype)


def _backends(x: jax.Array, weight: jax.Array, window: jax.Array, is_pack: bool) -> dict[str, Backend]:
    """The backends of `short_conv`, each for packs or for padded rows."""
    plain = xla.packed if is_pack else xla.padded
    definition = reference.packed if is_pack else reference.padded
    backends = {
        "xla": Backend(functools.partial(xla.widened, plain)),
        "reference": Backend(functools.partial(xla.widened, definition)),
    }
    refusal = pallas.refusal(x, weight, window)
    no_pack = "takes rows, with or without lengths, and no packs" if is_pack else refusal
    kernels = {"triton": (triton.packed if is_pack else triton.padded, refusal), "tpu": (tpu.padded, no_pack)}
    for name, (kernel, reason) in kernels.items():
        for suffix, interpret in (("", False), ("-interpret", True)):
            run = functools.partial(pallas.convolve, kernel, plain, interpret)
            backends[name + suffix] = Backend(run, reason)
    return backends


def _check_weight(x: jax.Array, weight: jax.Array, activation: str | None) -> None:
    if x.ndim != 3 or weight.ndim != 2 or x.shape[2] != weight.shape[1]:
        raise ValueError(f"short_conv: need x [B, T, C] and weight [W, C], got {x.shape} and {weight.shape}")
    if activation not in ("silu", None):
        raise ValueError(f"short_conv: {activation=} must be 'silu' or None")


def _window(x: jax.Array, weight: jax.Array, window: jax.Array | None, rows: int) -> jax.Array:
    want = (rows, weight.shape[0] - 1, x.shape[2])
    if window is None:
        return jnp.zeros(want, x.dtype)
    if window.shape != want:
        raise ValueError(f"short_conv: the window must be [B or N, W-1, C] = {want}, got {window.shape}")
    return window
