"""The short convolution as shifted multiply-adds over the whole call, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.precision import accumulator


def widened(
    run: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    counts: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`run`, which computes in one dtype, in float32 at least; y comes in x's dtype and windows in the window's."""
    compute = accumulator(x.dtype)
    wide = (array.astype(compute) for array in (x, weight, window))
    y, end, at = run(*wide, counts, boundaries, activation)
    return y.astype(x.dtype), end.astype(window.dtype), at.astype(window.dtype)


def taps_sum(taps: list[jax.Array], weight: jax.Array, activation: str | None) -> jax.Array:
    """Sums weight[j] * taps[j], oldest tap first, then activates: the one order that every path shares."""
    total = weight[0] * taps[0]
    for tap in range(1, len(taps)):
        total = total + weight[tap] * taps[tap]
    return jax.nn.silu(total) if activation == "silu" else total


def padded(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    lengths: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolves a batch of rows, each valid up to its length.

    Args:
        x: [B, T, C] in the dtype to compute in.
        weight: [W, C], same dtype.
        window: [B, W-1, C], same dtype.
        lengths: [B] int32 in 0..T; what lies behind is never read.
        boundaries: [B, NB] int32 token counts; counts beyond the length mean the length.
        activation: "silu" or None.

    Returns:
        y [B, T, C] (0 behind the length), window after the row's last valid token [B, W-1, C], windows at the
        boundaries [B, NB, W-1, C].
    """
    num_taps, num_tokens = weight.shape[0], x.shape[1]
    live = jnp.arange(num_tokens, dtype=jnp.int32)[None, :, None] < lengths[:, None, None]
    inputs = jnp.concatenate([window, jnp.where(live, x, 0)], axis=1)  # [B, W-1+T, C]
    y = taps_sum([inputs[:, tap : tap + num_tokens] for tap in range(num_taps)], weight, activation)

    first = num_tokens * jnp.arange(x.shape[0], dtype=jnp.int32)
    windows = windows_at(x.reshape(-1, x.shape[-1]), window, first, lengths, boundaries)
    return jax.lax.optimization_barrier(jnp.where(live, y, 0)), *windows


def packed(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    cu_seqlens: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolves N sequences that lie one after the other in x.

    Args:
        x: [T, C] in the dtype to compute in; tokens from cu_seqlens[N] on are padding.
        weight: [W, C], same dtype.
        window: [N, W-1, C], same dtype.
        cu_seqlens: [N+1] int32, not decreasing, first entry 0.
        boundaries: [N, NB] int32 token counts within each sequence; counts beyond its end mean its end.
        activation: "silu" or None.

    Returns:
        y [T, C] (0 in the padding), windows at the ends [N, W-1, C], at the boundaries [N, NB, W-1, C].
    """
    num_taps, num_tokens = weight.shape[0], x.shape[0]
    first, lengths = cu_seqlens[:-1], jnp.diff(cu_seqlens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    live = (token < cu_seqlens[-1])[:, None]
    x = jnp.where(live, x, 0)
    # Empty sequences share their start with the next one; `right` finds the last, which owns the token.
    owner = jnp.clip(jnp.searchsorted(cu_seqlens, token, side="right") - 1, 0, first.shape[0] - 1)
    offset = token - first[owner]

    taps = []
    for tap in range(num_taps):
        back = num_taps - 1 - tap
        shifted = jnp.pad(x, ((min(back, num_tokens), 0), (0, 0)))[:num_tokens]
        shifted = jnp.where((offset >= back)[:, None], shifted, 0)
        place = jnp.arange(back, dtype=jnp.int32)  # The sequence's first `back` tokens look into its window.
        target = jnp.where(place < lengths[:, None], first[:, None] + place, num_tokens)
        taps.append(shifted.at[target].set(window[:, tap : tap + back], mode="drop"))
    y = taps_sum(taps, weight, activation)

    return jnp.where(live, y, 0), *windows_at(x, window, first, lengths, boundaries)


def windows_at(
    x: jax.Array, window: jax.Array, first: jax.Array, lengths: jax.Array, boundaries: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The windows behind each sequence's last token [N, W-1, C], and at its boundaries [N, NB, W-1, C].

    They are gathered from x itself: whoever cuts them out of window ++ x keeps that copy of x alive.

    Args:
        x: [T, C]; sequence n is rows first[n] to first[n] + lengths[n].
        window: [N, W-1, C] before the first token.
        first, lengths: [N] int32.
        boundaries: [N, NB] int32 token counts; counts beyond the length mean the length.
    """
    size = window.shape[1]
    counts = jnp.minimum(jnp.concatenate([lengths[:, None], boundaries], axis=1), lengths[:, None])
    row = counts[..., None] + jnp.arange(size, dtype=jnp.int32)  # [N, 1+NB, W-1]: in window ++ x
    in_window = (row < size)[..., None]
    from_window = jax.vmap(lambda rows, index: rows.at[index].get(mode="clip"))(window, row)
    source = first[:, None, None] + row - size
    from_x = x.at[jnp.where(in_window[..., 0], 0, source)].get(mode="clip")
    windows = jnp.where(in_window, from_window, from_x)
    return windows[:, 0], windows[:, 1:]


def step(
    x: jax.Array, weight: jax.Array, window: jax.Array, activation: str | None
) -> tuple[jax.Array, jax.Array]:
    """Convolves one token a row: x [B, C], window [B, W-1, C] -> y [B, C], window [B, W-1, C]."""
    num_taps = weight.shape[0]
    taps = [window[:, tap] for tap in range(num_taps - 1)] + [x]
    return taps_sum(taps, weight, activation), jnp.concatenate([window, x[:, None]], axis=1)[:, 1:]
