"""The kernel's call: what it is given, what it gives, and what is written in place.

What is written where it was read from must not be read afterwards. A program has its head's state and value channels to
itself, but shares its query and key channels with the HV // H - 1 other value heads of their group:

- With `kda_draft` nothing is written in place: states and windows are new arrays.
- With a value head a query head, every channel is one program's own, and `kda_decode` writes the window where it lay.
  Of the program's threads one may write what another has yet to read: a barrier stands between (`body.py`).
- With more value heads the programs of a row run in any order and no barrier spans them. The new windows are then a
  new array, [B, W-1, C], shared channels written by the first head of their group, and put into the pool after the
  kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda_decode.inputs import Form, KDAParameters, Tokens
from pallas_kernels.kda_decode.slots import put
from pallas_kernels.kda_decode.triton.body import Plan, body
from pallas_kernels.kda_decode.triton.cost import decode_cost

THREAD_STATE = 32
"""Numbers of the state a thread holds: at K = V = 128 drafts spill with 64."""

MOST_WARPS = 16
"""With K V > 16 384 a thread holds more: with more threads it would have too few registers for what it holds now."""


def refusal(x: Tokens, layer: KDAParameters, states: jax.Array, windows: jax.Array) -> str | None:
    """Why the kernel cannot do a call, or None."""
    if states.dtype != jnp.float32:
        return f"computes in float32, got {states.dtype} states"
    if windows.dtype != x.mixed.dtype:
        return f"keeps windows in the dtype of mixed, {x.mixed.dtype}, got {windows.dtype}"
    if layer.conv.shape[0] < 2:
        return "needs a window, got a convolution of one tap"
    return None


def decode(
    x: Tokens,
    layer: KDAParameters,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array | None,
    form: Form,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `slots.decode`."""
    slots = jnp.arange(x.mixed.shape[0], dtype=jnp.int32) if slots is None else slots
    x = Tokens(*(a[:, None] for a in x))
    out, states, new = _call(x, layer, states, windows, slots, form, keep=False, interpret=interpret)
    if x.decay.shape[2] > form.heads:
        new = put(windows, slots, new[:, 0])
    return out[:, 0], states, new


def draft(
    x: Tokens,
    layer: KDAParameters,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array | None,
    form: Form,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `slots.draft`."""
    slots = jnp.arange(x.mixed.shape[0], dtype=jnp.int32) if slots is None else slots
    return _call(x, layer, states, windows, slots, form, keep=True, interpret=interpret)


def _call(
    x: Tokens,
    layer: KDAParameters,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array,
    form: Form,
    *,
    keep: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out [B, M, HV, V], then the states and the windows: the pools, or new arrays [B, M, ...]."""
    rows, tokens, value_heads, keys = x.decay.shape
    values, repeats = states.shape[-1], value_heads // form.heads
    plan = Plan(tokens, layer.conv.shape[0], keys, values, repeats, keep, form, interpret)
    arrays = (slots, *x, *layer, states, windows)
    aliases = {} if keep else {len(arrays) - 2: 1}
    if plan.window_in_place:
        aliases[len(arrays) - 1] = 2

    def like(pool: jax.Array, in_place: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(pool.shape if in_place else (rows, tokens, *pool.shape[1:]), pool.dtype)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    warps = max(1, keys * values // (32 * THREAD_STATE))
    return pl.pallas_call(
        functools.partial(body, plan=plan),
        grid=(value_heads, rows),
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((rows, tokens, value_heads, values), x.mixed.dtype),
            like(states, not keep),
            like(windows, plan.window_in_place),
        ],
        input_output_aliases=aliases,
        cost_estimate=decode_cost(x, layer, states, windows, keep=keep),
        compiler_params=pltriton.CompilerParams(
            num_warps=min(MOST_WARPS, 1 << (warps - 1).bit_length()), num_stages=1
        ),
        interpret=interpret,
        name="kda_draft" if keep else "kda_decode",
    )(*arrays)
