"""Backend "tpu" of the short convolution: one Pallas kernel for TPUs (Mosaic), a block of a row's tokens at a time.

A row's blocks come in order; its last inputs wait in the core's memory for the next one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.short_conv.cost import conv_cost

TOKENS = 256
CHANNELS = 512
EARLIER = 8
"""Earlier inputs that are kept: a register's rows, of which the last W - 1 are looked at."""


def padded(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    lengths: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`xla.padded` of at least one element, in the inputs' own dtypes; sums are in float32."""
    batch, tokens, channels = x.shape
    wide = CHANNELS if channels > CHANNELS else channels
    earlier = jnp.pad(window.astype(jnp.float32), ((0, 0), (EARLIER - window.shape[1], 0), (0, 0)))
    block = pl.BlockSpec((1, TOKENS, wide), lambda b, c, t, _: (b, t, c))
    y = pl.pallas_call(
        functools.partial(_body, activation=activation),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(channels, wide), pl.cdiv(tokens, TOKENS)),
            in_specs=[
                block,
                pl.BlockSpec((len(weight), wide), lambda b, c, t, _: (0, c)),
                pl.BlockSpec((1, EARLIER, wide), lambda b, c, t, _: (b, 0, c)),
            ],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((EARLIER + TOKENS, wide), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        cost_estimate=conv_cost(x, weight, window, boundaries.shape[1], activation),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="short_conv",
    )(lengths, x, weight, earlier)
    counts = jnp.minimum(jnp.concatenate([lengths[:, None], boundaries], axis=1), lengths[:, None])
    windows = _windows(x, window, counts)
    return y, windows[:, 0], windows[:, 1:]


def _windows(x: jax.Array, window: jax.Array, counts: jax.Array) -> jax.Array:
    """The windows behind as many tokens of each row, [B, M] -> [B, M, W-1, C], one after the other.

    XLA's gather for TPUs copies all of a wide x first.
    """
    size, tokens, channels = window.shape[1], x.shape[1], x.shape[2]
    head = jnp.concatenate([window, x[:, :size].astype(window.dtype)], axis=1)

    def cut(place: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, count = place
        early = jax.lax.dynamic_slice(head, (row, jnp.minimum(count, size), 0), (1, size, channels))
        if tokens < size:
            return early[0]
        late = jax.lax.dynamic_slice(x, (row, jnp.maximum(count - size, 0), 0), (1, size, channels))
        return jnp.where(count < size, early, late.astype(window.dtype))[0]

    batch, many = counts.shape
    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), many)
    return jax.lax.map(cut, (rows, counts.reshape(-1))).reshape(batch, many, size, channels)


def _body(lengths_ref, x_ref, weight_ref, earlier_ref, y_ref, inputs_ref, *, activation: str | None):
    b, t = pl.program_id(0), pl.program_id(2)

    @pl.when(t == 0)
    def _():
        inputs_ref[:EARLIER] = earlier_ref[0]

    token = t * TOKENS + jax.lax.broadcasted_iota(jnp.int32, (TOKENS, 1), 0)
    live = token < lengths_ref[b]
    inputs_ref[EARLIER:] = jnp.where(live, x_ref[0].astype(jnp.float32), 0.0)
    taps = weight_ref.shape[0]

    def term(tap: int) -> jax.Array:
        at = pl.ds(EARLIER - (taps - 1 - tap), TOKENS)
        return weight_ref[tap : tap + 1].astype(jnp.float32) * inputs_ref[at]

    y = functools.reduce(lambda total, tap: total + term(tap), range(1, taps), term(0))
    y = jax.nn.silu(y) if activation == "silu" else y
    y_ref[0] = jnp.where(live, y, 0.0).astype(y_ref.dtype)
    inputs_ref[:EARLIER] = inputs_ref[TOKENS:]
