"""The kernel's body: a row's value head a program, all tokens of the call, with the whole state in registers.

Sizes are cut into powers of two, so 96 channels are 64 and 32 and nothing is padded or masked. What the convolution
needs of a token is read as one tile, [W, channels]: rows shorter than there are threads the compiler would rather read
and convolve again in every thread that meets them in the state's layout, with 70 exponentials a thread in place of 12.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda_decode.inputs import Form

VALUE_TILE = 64
"""Value channels of a piece: with 128 in one the kernel spills, in pieces of 32 it compiles for twice as long."""

Pieces: TypeAlias = Sequence[pl.Slice]
Row: TypeAlias = tuple[jax.Array, ...]
"""A vector in pieces, float32."""


class Plan(NamedTuple):
    """The static sizes and choices of a call."""

    tokens: int  # M
    taps: int  # W
    keys: int
    values: int
    repeats: int  # value heads of a query head
    keep: bool  # what follows each token goes to new arrays, [B, M, ...]; else the state goes to its slot
    form: Form
    interpret: bool

    @property
    def window_in_place(self) -> bool:
        """Whether the window goes to its slot too: no two programs share a channel of it."""
        return not self.keep and self.repeats == 1


class Refs(NamedTuple):
    """The arrays in memory, in the order of the call."""

    slots: jax.Ref
    mixed: jax.Ref
    decay: jax.Ref
    beta: jax.Ref
    gate: jax.Ref
    conv: jax.Ref
    A_log: jax.Ref
    dt_bias: jax.Ref
    norm: jax.Ref
    states: jax.Ref
    windows: jax.Ref
    out: jax.Ref
    new_states: jax.Ref
    new_windows: jax.Ref


class Program(NamedTuple):
    """Whose tokens a program reads and writes."""

    ref: Refs
    plan: Plan
    row: jax.Array
    head: jax.Array
    slot: jax.Array

    @property
    def keys(self) -> Pieces:
        return _pieces(0, self.plan.keys, self.plan.keys)

    @property
    def values(self) -> Pieces:
        return _pieces(0, self.plan.values, VALUE_TILE)

    @property
    def channels(self) -> tuple[Pieces, Pieces, Pieces]:
        """The head's queries, keys and values among the convolution's channels."""
        plan = self.plan
        group = self.head if plan.repeats == 1 else jax.lax.div(self.head, jnp.int32(plan.repeats))
        width = plan.form.heads * plan.keys
        return (
            _pieces(group * plan.keys, plan.keys, plan.keys),
            _pieces(width + group * plan.keys, plan.keys, plan.keys),
            _pieces(2 * width + self.head * plan.values, plan.values, VALUE_TILE),
        )


def body(*refs: jax.Ref, plan: Plan) -> None:
    """A program of the grid (HV, B)."""
    ref = Refs(*refs)
    head, row = pl.program_id(0), pl.program_id(1)
    program = Program(ref, plan, row, head, ref.slots[row])
    pl.when(program.slot < 0)(lambda: _padding(program))
    pl.when(program.slot >= 0)(lambda: _tokens(program))


def _padding(at: Program) -> None:
    """Zeros for a row without a slot; the pools have nothing of it."""

    def token(m: jax.Array, carry: jax.Array) -> jax.Array:
        _write(at.ref.out, (at.row, m, at.head), at.values, _zeros(at.values))
        if at.plan.keep:
            for rows in at.keys:
                none = tuple(jnp.zeros((rows.size, columns.size), jnp.float32) for columns in at.values)
                _write(at.ref.new_states, (at.row, m, at.head, rows), at.values, none)
            _write_window(at, m, [[_zeros(part) for part in at.channels]] * (at.plan.taps - 1))
        return carry

    _each_token(at.plan, token, jnp.int32(0))


def _tokens(at: Program) -> None:
    """All tokens of a row, a state and a window later each."""
    plan, ref = at.plan, at.ref

    def token(m: jax.Array, state: tuple[Row, ...]) -> tuple[Row, ...]:
        q, k, v = (_convolved(at, m, part) for part in at.channels)
        q, k = _unit(q, plan.form.scale), _unit(k, 1.0)
        state = _decayed(at, m, state)
        beta = jax.nn.sigmoid(ref.beta[at.row, m, at.head].astype(jnp.float32))
        error = tuple(beta * (want - known) for want, known in zip(v, _seen(k, state)))
        state = tuple(
            tuple(x + a[:, None] * e[None, :] for x, e in zip(xs, error)) for a, xs in zip(k, state)
        )
        out = _gated(at, m, _seen(q, state))
        window = [
            [tuple(_input(at, m + 1 + tap, piece) for piece in part) for part in at.channels]
            for tap in range(plan.taps - 1)
        ]

        if not (plan.keep or plan.interpret):  # what is written in place has been read by all threads
            pltriton.debug_barrier()
        _write(ref.out, (at.row, m, at.head), at.values, out)
        for rows, xs in zip(at.keys, state, strict=True):
            _write(ref.new_states, (*_place(at, m, not plan.keep), at.head, rows), at.values, xs)
        _write_window(at, m, window)
        return state

    state = tuple(_read(ref.states, (at.slot, at.head, rows), at.values) for rows in at.keys)
    _each_token(plan, token, state)


def _each_token(plan: Plan, token: Callable[[jax.Array, Any], Any], carried: Any) -> None:
    if plan.tokens == 1:
        token(jnp.int32(0), carried)
    else:
        jax.lax.fori_loop(0, plan.tokens, token, carried)


def _input(at: Program, place: jax.Array, piece: pl.Slice) -> jax.Array:
    """What the convolution is given at one or more places, counted from the oldest of the row's window on."""
    size = at.plan.taps - 1
    before = at.ref.windows[at.slot, jnp.minimum(place, size - 1), piece]
    now = at.ref.mixed[at.row, jnp.clip(place - size, 0, at.plan.tokens - 1), piece]
    return jnp.where(jnp.expand_dims(place, -1) < size, before, now).astype(jnp.float32)


def _convolved(at: Program, m: jax.Array, part: Pieces) -> Row:
    """A token after the short convolution."""
    taps = at.plan.taps
    tap = jax.lax.broadcasted_iota(jnp.int32, (1 << (taps - 1).bit_length(),), 0)

    def each(piece: pl.Slice) -> jax.Array:
        weight = at.ref.conv[jnp.minimum(tap, taps - 1), piece].astype(jnp.float32)
        product = jnp.where((tap < taps)[:, None], weight * _input(at, m + tap, piece), 0.0)
        x = jnp.sum(product, axis=0)
        return x * jax.nn.sigmoid(x)

    return tuple(each(piece) for piece in part)


def _decayed(at: Program, m: jax.Array, state: tuple[Row, ...]) -> tuple[Row, ...]:
    """The state behind a token's decay."""
    rate, bound = jnp.exp(at.ref.A_log[at.head].astype(jnp.float32)), at.plan.form.lower_bound

    def decay(z: jax.Array) -> jax.Array:
        return jnp.exp(-rate * jax.nn.softplus(z) if bound is None else bound * jax.nn.sigmoid(rate * z))

    raw = _read(at.ref.decay, (at.row, m, at.head), at.keys)
    bias = _read(at.ref.dt_bias, (at.head,), at.keys)
    decays = [decay(z + b)[:, None] for z, b in zip(raw, bias)]
    return tuple(tuple(d * x for x in xs) for d, xs in zip(decays, state, strict=True))


def _seen(by: Row, state: tuple[Row, ...]) -> Row:
    """What a key or query finds in the state, [V]."""
    columns = zip(*state)
    return tuple(
        _total(jnp.sum(a[:, None] * x, axis=0) for a, x in zip(by, column, strict=True)) for column in columns
    )


def _unit(x: Row, scale: float) -> Row:
    """Scaled to unit length, then by `scale`."""
    factor = scale * jax.lax.rsqrt(_squares(x) + 1e-6)
    return tuple(piece * factor for piece in x)


def _gated(at: Program, m: jax.Array, x: Row) -> Row:
    """The output's RMS norm and gate."""
    factor = jax.lax.rsqrt(_squares(x) / at.plan.values + at.plan.form.eps)
    weight = _read(at.ref.norm, (), at.values)
    gate = _read(at.ref.gate, (at.row, m, at.head), at.values)
    return tuple(piece * factor * w * jax.nn.sigmoid(g) for piece, w, g in zip(x, weight, gate, strict=True))


def _squares(x: Row) -> jax.Array:
    return _total(jnp.sum(piece * piece) for piece in x)


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _write_window(at: Program, m: jax.Array | int, window: list[list[Row]]) -> None:
    """Writes the channels that are the program's to write: a group's queries and keys are its first head's."""
    place = _place(at, m, at.plan.window_in_place)

    def write(which: slice) -> None:
        for tap, parts in enumerate(window):
            for part, x in list(zip(at.channels, parts, strict=True))[which]:
                _write(at.ref.new_windows, (*place, tap), part, x)

    write(slice(2, 3))
    if at.plan.repeats == 1:
        write(slice(0, 2))
    else:
        first = jax.lax.rem(at.head, jnp.int32(at.plan.repeats)) == 0
        pl.when(first)(lambda: write(slice(0, 2)))


def _place(at: Program, m: jax.Array | int, in_place: bool) -> tuple:
    return (at.slot,) if in_place else (at.row, m)


def _pieces(begin: jax.Array | int, size: int, most: int) -> Pieces:
    """`size` channels from `begin` on, in powers of two up to `most`."""
    pieces = []
    while size:
        length = 1 << (min(size, most).bit_length() - 1)
        pieces.append(pl.ds(begin, length))
        begin, size = begin + length, size - length
    return pieces


def _read(ref: jax.Ref, place: tuple, pieces: Pieces) -> Row:
    return tuple(ref[(*place, piece)].astype(jnp.float32) for piece in pieces)


def _write(ref: jax.Ref, place: tuple, pieces: Pieces, row: Row) -> None:
    for piece, x in zip(pieces, row, strict=True):
        ref[(*place, piece)] = x.astype(ref.dtype)


def _zeros(pieces: Pieces) -> Row:
    return tuple(jnp.zeros((piece.size,), jnp.float32) for piece in pieces)
