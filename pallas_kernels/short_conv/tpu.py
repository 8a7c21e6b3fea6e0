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
    counts = jnp.minimum(jnp.concatenate([lengths[:, None], boundaries], axis=1), lengths[:, None])
    many = counts.shape[1]
    block = pl.BlockSpec((1, TOKENS, wide), lambda b, c, t, _: (b, t, c))
    y, windows = pl.pallas_call(
        functools.partial(_body, activation=activation),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(channels, wide), pl.cdiv(tokens, TOKENS)),
            in_specs=[
                block,
                pl.BlockSpec((len(weight), wide), lambda b, c, t, _: (0, c)),
                pl.BlockSpec((1, EARLIER, wide), lambda b, c, t, _: (b, 0, c)),
            ],
            out_specs=[block, pl.BlockSpec((1, many, EARLIER, wide), lambda b, c, t, _: (b, 0, 0, c))],
            scratch_shapes=[pltpu.VMEM((EARLIER + TOKENS, wide), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((batch, many, EARLIER, channels), jnp.float32),
        ],
        cost_estimate=conv_cost(x, weight, window, boundaries.shape[1], activation),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="short_conv",
    )(counts, x, weight, earlier)
    windows = windows[:, :, EARLIER - window.shape[1] :].astype(window.dtype)
    return y, windows[:, 0], windows[:, 1:]


def _body(
    counts_ref, x_ref, weight_ref, earlier_ref, y_ref, windows_ref, inputs_ref, *, activation: str | None
):
    b, t = pl.program_id(0), pl.program_id(2)

    @pl.when(t == 0)
    def _():
        inputs_ref[:EARLIER] = earlier_ref[0]

    token = t * TOKENS + jax.lax.broadcasted_iota(jnp.int32, (TOKENS, 1), 0)
    live = token < counts_ref[b, 0]
    inputs_ref[EARLIER:] = jnp.where(live, x_ref[0].astype(jnp.float32), 0.0)
    taps = weight_ref.shape[0]

    def term(tap: int) -> jax.Array:
        at = pl.ds(EARLIER - (taps - 1 - tap), TOKENS)
        return weight_ref[tap : tap + 1].astype(jnp.float32) * inputs_ref[at]

    y = functools.reduce(lambda total, tap: total + term(tap), range(1, taps), term(0))
    y = jax.nn.silu(y) if activation == "silu" else y
    y_ref[0] = jnp.where(live, y, 0.0).astype(y_ref.dtype)

    for m in range(windows_ref.shape[1]):
        within = counts_ref[b, m] - t * TOKENS  # tokens of this block

        @pl.when((within > 0) & (within <= TOKENS) | (within == 0) & (t == 0))
        def _(m=m, within=within):
            for row in range(EARLIER):  # a TPU takes single rows from anywhere
                windows_ref[0, m, row : row + 1] = inputs_ref[pl.ds(within + row, 1)]

    inputs_ref[:EARLIER] = inputs_ref[TOKENS:]
