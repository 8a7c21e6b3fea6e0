"""KDA's kernels look at nothing that is not theirs: NaN or 1e30 there changes no bit of any result."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda_prefill, kda_step
from pallas_kernels.kda.reference import Pack
from pallas_kernels.kda.table import make_table, mark
from pallas_kernels.kda.triton.intra import Matrices, intra
from pallas_kernels.kda.triton.state import advance
from pallas_kernels.kda.triton.tile import BLOCK, Plan

FILLS = pytest.mark.parametrize("fill", [np.nan, 1e30])
KERNELS: dict[str, dict[str, Any]] = {
    "triton": dict(implementation="triton-interpret", chunk_size=32),
    "tpu": dict(implementation="tpu-interpret"),
}
EACH = pytest.mark.parametrize("kernel", KERNELS)
TOKENS, HEADS, KEYS, VALUES = 45, 2, 16, 24


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray


def inputs(batch: int = 1, states: int = 1, keys: int = KEYS, values: int = VALUES) -> Inputs:
    random = np.random.default_rng(0)
    q, k, g = random.standard_normal((3, batch, TOKENS, HEADS, keys)) / keys**0.5
    v = random.standard_normal((batch, TOKENS, HEADS, values))
    beta = random.uniform(size=(batch, TOKENS, HEADS))
    state = random.standard_normal((states, HEADS, keys, values))
    return Inputs(*(x.astype(np.float32) for x in (q, k, v, -5 * np.abs(g), beta, state)))


def filled(x: np.ndarray, where: np.ndarray, fill: float) -> np.ndarray:
    """x with another number at some places of its leading axes."""
    x = x.copy()
    x[where] = fill
    return x


def tokens_filled(arrays: Inputs, where: np.ndarray, fill: float) -> Inputs:
    """Every array of tokens so, where [B, T]."""
    return Inputs(*(filled(x, where, fill) for x in arrays[:5]), state=arrays.state)


@functools.cache
def program(kernel: str):
    return jax.jit(functools.partial(kda_prefill, **KERNELS[kernel]))


def same_bits(want: Any, got: Any) -> None:
    for a, b in zip(map(np.asarray, want), map(np.asarray, got), strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@EACH
@FILLS
def test_tokens_of_no_sequence_reach_nothing(fill: float, kernel: str) -> None:
    """Behind rows' lengths (one row has none at all) and behind a pack's last sequence."""
    arrays, run = inputs(batch=3, states=3), program(kernel)
    lengths = np.array([17, 0, 44])
    behind = np.arange(TOKENS) >= lengths[:, None]
    where = dict(lengths=lengths, boundaries=np.array([0, 16, 17, 44]))
    want = run(*tokens_filled(arrays, behind, 0), **where)
    assert all(np.isfinite(x).all() for x in want)
    same_bits(want, run(*tokens_filled(arrays, behind, fill), **where))

    arrays, cu = inputs(states=5), np.array([0, 0, 20, 20, 21, 21])
    behind = (np.arange(TOKENS) >= cu[-1])[None]
    where = dict(cu_seqlens=cu, boundaries=np.array([0, 1, 20]))
    want = run(*tokens_filled(arrays, behind, 0), **where)
    assert all(np.isfinite(x).all() for x in want)
    same_bits(want, run(*tokens_filled(arrays, behind, fill), **where))


@EACH
@FILLS
def test_a_sequence_keeps_what_is_wrong_to_itself(fill: float, kernel: str) -> None:
    """Its tokens and its state: its neighbours in the pack, empty ones too, have the bits they have beside zeros."""
    arrays, cu = inputs(states=5), np.array([0, 13, 13, 30, 31, TOKENS])
    sick, tokens = 2, (np.arange(TOKENS) >= 13) & (np.arange(TOKENS) < 30)
    where = dict(cu_seqlens=cu, boundaries=np.array([0, 1, 13]))
    results = []
    for number in (0.0, fill):
        made = tokens_filled(arrays, tokens[None], number)
        made = made._replace(state=filled(arrays.state, np.arange(5) == sick, number))
        out, final, at = map(np.asarray, program(kernel)(*made, **where))
        results.append((out[:, ~tokens], np.delete(final, sick, 0), np.delete(at, sick, 0)))
    assert all(np.isfinite(x).all() for x in results[0])
    same_bits(*results)


@EACH
@FILLS
def test_an_empty_sequence_keeps_its_state_whatever_it_is(fill: float, kernel: str) -> None:
    arrays, cu, empty = (
        inputs(states=4),
        np.array([0, 0, 18, 18, TOKENS]),
        np.array([True, False, True, False]),
    )
    where = dict(cu_seqlens=cu, boundaries=np.array([0, 16]))
    clean, got = (
        tuple(
            map(np.asarray, program(kernel)(*arrays._replace(state=filled(arrays.state, empty, x)), **where))
        )
        for x in (0.0, fill)
    )
    same_bits((clean[0], clean[1][~empty], clean[2][~empty]), (got[0], got[1][~empty], got[2][~empty]))
    assert all(np.isfinite(x).all() for x in (got[0], got[1][~empty]))
    for x in (got[1], got[2]):
        np.testing.assert_array_equal(x[empty], np.full_like(x[empty], fill))


@EACH
@FILLS
def test_a_value_channel_keeps_what_is_wrong_to_itself(fill: float, kernel: str) -> None:
    """Beside it are others, in and out of its tile, and the padding behind the last of a head."""
    arrays, run = inputs(), program(kernel)
    for channel in (0, VALUES - 1):
        results = []
        for number in (0.0, fill):
            v, state = arrays.v.copy(), arrays.state.copy()
            v[..., 1, channel] = state[:, 1, :, channel] = number
            out, final = map(np.asarray, run(*arrays._replace(v=v, state=state)))
            sick = np.arange(HEADS * VALUES).reshape(HEADS, VALUES) == VALUES + channel
            results.append((out[..., ~sick], np.moveaxis(final, 2, -1)[:, ~sick]))
        assert all(np.isfinite(x).all() for x in results[0])
        same_bits(*results)


@pytest.mark.parametrize("keys, values", [(32, 32), (48, 20)])
@FILLS
def test_a_step_reads_its_slots_and_its_rows_only(fill: float, keys: int, values: int) -> None:
    """Padding rows' inputs and places of the pool that no row names; those keep their bits, NaN's own too."""
    rows = [x[0, :4] for x in inputs(keys=keys, values=values)[:5]]
    pool = np.random.default_rng(1).standard_normal((7, HEADS, keys, values)).astype(np.float32)
    slots = np.array([5, -1, 2, -3])
    free = ~np.isin(np.arange(7), slots)
    run = jax.jit(functools.partial(kda_step, implementation="triton-interpret"))
    clean, got = (
        tuple(
            map(np.asarray, run(*(filled(x, slots < 0, y) for x in rows), filled(pool, free, y), slots=slots))
        )
        for y in (0.0, fill)
    )
    assert np.isfinite(clean[0]).all() and np.isfinite(clean[1]).all()
    same_bits((clean[0], clean[1][~free]), (got[0], got[1][~free]))
    same_bits(
        (np.zeros_like(got[0][slots < 0]), filled(pool, free, fill)[free]), (got[0][slots < 0], got[1][free])
    )


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@FILLS
def test_what_one_kernel_leaves_the_next_does_not_read(fill: float, half: bool) -> None:
    """Squares above the diagonal, chunks of no token, and rows behind the sequence's and the arrays' last token.

    What no kernel writes is NaN in interpret mode: rows of the output that are no sequence's stay so.
    """
    work = jnp.dtype(jnp.bfloat16 if half else jnp.float32)
    keys, values, chunk, spare, count = 32, 32, 32, 3, 40
    plan = Plan(TOKENS, HEADS, keys, values, chunk=chunk, work=work, interpret=True)
    arrays = inputs(keys=keys, values=values)
    pack = Pack(*(jnp.array([x], jnp.int32) for x in (0, count, 0)))
    table, marks = mark(make_table(pack, TOKENS, chunk), pack, jnp.array([[0, 20]], jnp.int32), chunk)
    unused = np.asarray(table.live) == 0
    assert unused.any() and not unused.all()
    above = np.kron(np.triu(np.ones((chunk // BLOCK,) * 2), 1), np.ones((BLOCK, BLOCK))).astype(bool)

    def flat(x: np.ndarray, dtype: jnp.dtype, number: float) -> jax.Array:
        """[tokens, H * channels], and rows behind them."""
        rows = x.reshape(TOKENS, -1)
        behind = np.full((TOKENS - count + spare, rows.shape[1]), number, rows.dtype)
        return jnp.asarray(np.concatenate([rows[:count], behind]), dtype)

    def square(x: jax.Array, number: float) -> jax.Array:
        return chunks(jnp.where(above, jnp.asarray(number, x.dtype), x), number)

    def chunks(x: jax.Array, number: float) -> jax.Array:
        return x.at[unused].set(jnp.asarray(number, x.dtype))

    @jax.jit
    def run(q, k, v, g, beta, number):
        made = intra(q, k, g, beta, table, plan)
        squares = (square(x, number) for x in (made.inverse, made.pairs))
        later = Matrices(*squares, *(chunks(x, number) for x in made[2:]))
        state = jnp.asarray(arrays.state)
        out, final, at = advance(v, beta, later, state, table, marks, plan, 0.5)
        out = out.astype(jnp.float32)
        # no chunk ends at boundary 0: the state there is not written
        return out[:count], final, at[:, 1:], out[count:]

    def results(number: float) -> list[np.ndarray]:
        dtypes = work, work, work, jnp.dtype(jnp.float32), jnp.dtype(jnp.float32)
        made = [flat(x, dtype, number) for x, dtype in zip(arrays[:5], dtypes, strict=True)]
        return [np.asarray(x) for x in run(*made, number)]

    *clean, unwritten = results(0.0)
    assert unwritten.shape == (TOKENS - count, HEADS * values) and np.isnan(unwritten).all()
    assert all(np.isfinite(x).all() for x in clean)
    same_bits((*clean, unwritten), results(fill))
