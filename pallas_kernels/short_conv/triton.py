"""Backend "triton" of the short convolution: one Pallas kernel for NVIDIA GPUs, a tile of rows and channels a program.

A row is a token's output, or an input that a window hands on. Memory gives every input once: a token's earlier inputs
are its neighbours' and come from a cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.short_conv.cost import conv_cost

ROWS = 16
CHANNELS = 128


class Plan(NamedTuple):
    """The static sizes of a call."""

    num_tokens: int  # rows of the flat token axis
    row_tokens: int | None  # of each sequence, padding included; None in a pack
    sequences: int
    channels: int
    taps: int
    marked: int  # boundaries of a sequence
    activation: str | None

    @property
    def width(self) -> int:
        """Channels of a program."""
        return min(CHANNELS, pl.next_power_of_2(self.channels))

    @property
    def windows(self) -> tuple[int, ...]:
        """How many windows a sequence hands on: one behind its last token, and those at its boundaries."""
        return tuple(size for size in (1, self.marked) if size and self.taps > 1)

    def tiles(self, rows: int) -> int:
        """Programs that as many rows take."""
        return pl.cdiv(rows, ROWS)


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
    run = functools.partial(_call, row_tokens=x.shape[1], activation=activation, interpret=interpret)
    y, end, at = run(x.reshape(-1, x.shape[2]), weight, window, lengths, boundaries)
    return y.reshape(x.shape), end, at


def packed(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    cu_seqlens: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`xla.packed` of at least one element, in the inputs' own dtypes; sums are in float32."""
    run = functools.partial(_call, row_tokens=None, activation=activation, interpret=interpret)
    return run(x, weight, window, cu_seqlens, boundaries)


def _call(
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    counts: jax.Array,
    boundaries: jax.Array,
    *,
    row_tokens: int | None,
    activation: str | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel on a flat token axis, [tokens, C]; `counts` are lengths of rows, or a pack's cu_seqlens."""
    sequences, marked = boundaries.shape
    plan = Plan(len(x), row_tokens, sequences, x.shape[1], len(weight), marked, activation)
    rows = [plan.num_tokens, *(sequences * each * (plan.taps - 1) for each in plan.windows)]
    dtypes = [x.dtype, *(window.dtype for _ in plan.windows)]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    y, *windows = pl.pallas_call(
        functools.partial(_body, plan=plan),
        grid=(sum(map(plan.tiles, rows)), pl.cdiv(plan.channels, plan.width)),
        in_specs=[whole] * 5,
        out_specs=[whole] * len(rows),
        out_shape=[jax.ShapeDtypeStruct((n, plan.channels), dtype) for n, dtype in zip(rows, dtypes)],
        cost_estimate=conv_cost(x, weight, window, marked, activation),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="short_conv",
        # no kernel takes an array of no elements; weight and counts stand in for what is not looked at
    )(x, weight, window if window.size else weight, counts, boundaries if marked else counts)
    none = jnp.zeros((sequences, marked, *window.shape[1:]), window.dtype)
    end, at = (*windows, none)[:2] if windows else (window, none)
    return y, end.reshape(window.shape), at.reshape(none.shape)


class Inputs(NamedTuple):
    """The kernel's inputs, as references."""

    x: Any  # [tokens, C]
    weight: Any  # [W, C]
    window: Any  # [N, W-1, C]
    counts: Any  # [B] or [N + 1]
    boundaries: Any  # [N, NB]


def _body(*refs, plan: Plan):
    inputs, (y_ref, *windows_refs) = Inputs(*refs[:5]), refs[5:]
    tile, j = pl.program_id(0), pl.program_id(1)
    column = j * plan.width + jax.lax.broadcasted_iota(jnp.int32, (1, plan.width), 1)
    begin = plan.tiles(plan.num_tokens)

    @pl.when(tile < begin)
    def _():
        _convolve(inputs, y_ref, _rows(tile), column, plan)

    for windows_ref, asked in zip(windows_refs, (False, True)):
        end = begin + plan.tiles(windows_ref.shape[0])

        @pl.when((tile >= begin) & (tile < end))
        def _(begin=begin, windows_ref=windows_ref, asked=asked):
            _hand_on(inputs, windows_ref, _rows(tile - begin), column, asked, plan)

        begin = end


def _convolve(inputs: Inputs, y_ref, token: jax.Array, column: jax.Array, plan: Plan):
    """Outputs of tokens."""
    n = _owner(inputs.counts, token, plan)
    first, length = _extent(inputs.counts, n, plan)
    live = token - first < length

    def term(tap: int) -> jax.Array:
        back = plan.taps - 1 - tap
        x = _read(inputs, n, first, token - first - back, live, column, plan, in_x=back == 0)
        weight = pltriton.load(inputs.weight.at[tap, column], mask=column < plan.channels, other=0.0)
        return weight.astype(jnp.float32) * x

    y = functools.reduce(lambda total, tap: total + term(tap), range(1, plan.taps), term(0))
    y = jax.nn.silu(y) if plan.activation == "silu" else y
    _write(y_ref, token, column, jnp.where(live[:, None], y, 0.0))


def _hand_on(inputs: Inputs, windows_ref, row: jax.Array, column: jax.Array, asked: bool, plan: Plan):
    """Rows of the windows at the boundaries asked for, or behind the last tokens."""
    size, many = jnp.int32(plan.taps - 1), jnp.int32(plan.marked if asked else 1)
    which, place = jax.lax.div(row, size), jax.lax.rem(row, size)
    n = jnp.minimum(jax.lax.div(which, many), plan.sequences - 1)
    first, length = _extent(inputs.counts, n, plan)
    count = jnp.minimum(inputs.boundaries[n, jax.lax.rem(which, many)], length) if asked else length
    live = row < windows_ref.shape[0]
    x = _read(inputs, n, first, count + place - size, live, column, plan)
    _write(windows_ref, row, column, x)


def _rows(tile) -> jax.Array:
    return tile * ROWS + jax.lax.broadcasted_iota(jnp.int32, (ROWS,), 0)


def _extent(counts_ref, n: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The first tokens of sequences, and how many they have."""
    if plan.row_tokens is not None:
        return n * plan.row_tokens, counts_ref[n]
    first = counts_ref[n]
    return first, counts_ref[n + 1] - first


def _owner(counts_ref, token: jax.Array, plan: Plan) -> jax.Array:
    """The last sequence that begins at a token or before it."""
    last = plan.sequences - 1
    if plan.row_tokens is not None:
        return jnp.minimum(jax.lax.div(token, jnp.int32(plan.row_tokens)), last)
    n = jnp.zeros_like(token)
    for bit in reversed(range(last.bit_length())):
        later = n + (1 << bit)
        begun = counts_ref[jnp.minimum(later, last)] <= token
        n = jnp.where(begun & (later <= last), later, n)
    return n


def _read(
    inputs: Inputs, n: jax.Array, first: jax.Array, at: jax.Array, live: jax.Array, column: jax.Array, plan: Plan,
    *, in_x: bool = False,
) -> jax.Array:  # fmt: skip
    """Inputs of sequences n, `at` tokens behind their first or, where negative (never if `in_x`), in their windows.

    Returns:
        float32 [rows, columns], zeros where nobody lives.
    """

    def load(ref, place: tuple[jax.Array, ...], there: jax.Array) -> jax.Array:
        mask = there[:, None] & (column < plan.channels)
        return pltriton.load(ref.at[(*place, column)], mask=mask, other=0.0).astype(jnp.float32)

    inside = at >= 0
    x = load(inputs.x, ((first + at)[:, None],), live & inside)
    if in_x:
        return x
    before = load(inputs.window, (n[:, None], (plan.taps - 1 + at)[:, None]), live & ~inside)
    return jnp.where(inside[:, None], x, before)


def _write(ref, row: jax.Array, column: jax.Array, values: jax.Array) -> None:
    rows, channels = ref.shape
    mask = (row < rows)[:, None] & (column < channels)
    pltriton.store(ref.at[row[:, None], column], values.astype(ref.dtype), mask=mask)
