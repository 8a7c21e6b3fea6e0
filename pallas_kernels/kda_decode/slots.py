"""Rows whose states lie in slots of a pool: taken out, moved on, and put back or kept beside it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.kda_decode.inputs import Form, KDAParameters, Tokens


@runtime_checkable
class Token(Protocol):
    """One token of each row: out [B, HV, V], the states [B, HV, K, V] and the windows [B, W-1, C]."""

    def __call__(
        self, x: Tokens, layer: KDAParameters, state: jax.Array, window: jax.Array, form: Form
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def decode(
    token: Token,
    x: Tokens,
    layer: KDAParameters,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array | None,
    form: Form,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token [B, ...] a row; slots [B] int32, negative for padding, None for row b at b.

    Returns out [B, HV, V] and both pools.
    """
    if slots is None:
        return token(x, layer, states, windows, form)
    out, state, window = token(x, layer, taken(states, slots), taken(windows, slots), form)
    return _live(slots, out), put(states, slots, state), put(windows, slots, window)


def draft(
    token: Token,
    x: Tokens,
    layer: KDAParameters,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array | None,
    form: Form,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """M tokens [B, M, ...] a row: out [B, M, HV, V], states [B, M, HV, K, V] and windows [B, M, W-1, C] after each."""
    begin = (states, windows) if slots is None else (taken(states, slots), taken(windows, slots))

    def one(carried: tuple[jax.Array, jax.Array], now: Tokens):
        out, state, window = token(now, layer, *carried, form)
        return (state, window), (out, state, window)

    _, kept = jax.lax.scan(one, begin, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), x))
    out, after_states, after_windows = (jnp.moveaxis(a, 0, 1) for a in kept)
    if slots is None:
        return out, after_states, after_windows
    return _live(slots, out), _live(slots, after_states), _live(slots, after_windows)


def taken(pool: jax.Array, slots: jax.Array) -> jax.Array:
    """The rows' entries; zeros for padding."""
    return pool.at[_place(pool, slots)].get(mode="fill", fill_value=0)


def put(pool: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """The pool with the rows' entries replaced; those of padding are dropped."""
    return pool.at[_place(pool, slots)].set(rows, mode="drop")


def _live(slots: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows with zeros for padding."""
    return jnp.where((slots < 0).reshape(-1, *[1] * (rows.ndim - 1)), 0, rows)


def _place(pool: jax.Array, slots: jax.Array) -> jax.Array:
    # A negative index counts from the end: padding goes behind it.
    return jnp.where(slots < 0, pool.shape[0], slots)
