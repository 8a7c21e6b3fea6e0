"""What a call of the kernel must do, by count: for the compiler's schedule and for `check`."""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.kda_decode.inputs import KDAParameters, Tokens


def decode_cost(x: Tokens, layer: KDAParameters, states: Any, windows: Any, *, keep: bool) -> pl.CostEstimate:
    """A call's; bytes are those of the rows' arrays and of the parameters, each read or written once.

    Args:
        x: [B, M, ...], arrays or their shapes and dtypes.
        layer, states, windows: likewise.
        keep: a state and a window is written after each token, not after the last one only.
    """
    rows, tokens, value_heads, keys = x.decay.shape
    taps, values = layer.conv.shape[0], states.shape[-1]
    slot = sum(pool.size // pool.shape[0] * pool.dtype.itemsize for pool in (states, windows))
    inputs = sum(array.size * array.dtype.itemsize for array in (*x, *layer))
    out = rows * tokens * value_heads * values * x.mixed.dtype.itemsize
    head = 2 * keys + values  # channels that a program convolves
    # of a head: the state decays, is asked for the key, is corrected, is asked for the query
    flops = 7 * keys * values + 2 * taps * head
    exponentials = head + 2 * keys + values
    return pl.CostEstimate(
        flops=rows * tokens * value_heads * flops,
        transcendentals=rows * tokens * value_heads * exponentials,
        bytes_accessed=rows * (1 + (tokens if keep else 1)) * slot + inputs + out,
    )
