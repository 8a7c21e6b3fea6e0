"""The definition of the short convolution: one token after the other, each sequence by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def convolve(
    x: jax.Array, weight: jax.Array, window: jax.Array, activation: str | None
) -> tuple[jax.Array, jax.Array]:
    """Convolves one sequence: y[t] = act(sum_j weight[j] * inputs[t - (W-1) + j]), taps added oldest first.

    Args:
        x: [T, C] inputs, in the dtype to compute in.
        weight: [W, C]; the last tap meets the current token.
        window: [W-1, C], the inputs before x[0], oldest first.
        activation: "silu" or None.

    Returns:
        y [T, C], and every window: [T+1, W-1, C], the t-th as it stands after t tokens.
    """

    def token(before: jax.Array, now: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        inputs = jnp.concatenate([before, now[None]])
        total = sum((weight[tap] * inputs[tap] for tap in range(1, len(weight))), start=weight[0] * inputs[0])
        return inputs[1:], (jax.nn.silu(total) if activation == "silu" else total, inputs[1:])

    _, (y, after) = jax.lax.scan(token, window, x)
    return y, jnp.concatenate([window[None], after])


def padded(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    lengths: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of a padded batch, each by itself; see `short_conv.xla.padded` for the arguments."""
    live = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :, None] < lengths[:, None, None]
    y, windows = jax.vmap(convolve, in_axes=(0, None, 0, None))(
        jnp.where(live, x, 0), weight, window, activation
    )
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    marks = windows[row[:, None], jnp.minimum(boundaries, lengths[:, None])]
    return jnp.where(live, y, 0), windows[row, lengths], marks


def packed(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    cu_seqlens: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sequences of a pack: each is cut out to a row of a padded batch, and its outputs put back."""
    num_tokens, lengths = x.shape[0], jnp.diff(cu_seqlens)
    token = cu_seqlens[:-1, None] + jnp.arange(num_tokens, dtype=jnp.int32)  # [N, T]
    rows = x[jnp.minimum(token, num_tokens - 1)]
    y, ends, marks = padded(rows, weight, window, lengths, boundaries, activation)
    live = jnp.arange(num_tokens, dtype=jnp.int32) < lengths[:, None]
    out = jnp.zeros_like(x).at[jnp.where(live, token, num_tokens)].add(y, mode="drop")
    return out, ends, marks
