"""States in pages and slots: the bits of states in one piece, and nothing is written but the rows that a call adds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax.forward import SplitModel, decode, prefill, split
from kda_jax.state import KDAState, MLAState, ModelState, PagedMLAState, PooledState, SlottedKDAState, empty
from random_model import random_model, small_config

pytestmark = pytest.mark.optimised

ROWS, TOKENS = 3, 200
OPTIONS: dict[str, Any] = dict(
    gate_lower_bound=-5.0, full_rank_gate=True, mla_output_gate=True, q_lora_rank=10, kda_num_v_heads=4
)


@pytest.fixture(scope="module")
def parts() -> SplitModel:
    return split(random_model(small_config(**OPTIONS)))


@functools.partial(jax.jit, static_argnames="graphdef")
def read(graphdef, params, tokens, state, lengths):
    return nnx.merge(graphdef, params)(tokens, state, lengths)


def pooled(state: ModelState, page: int) -> PooledState:
    """The state with its latents in scattered pages of a pool that is NaN wherever no live row lies."""
    rng = np.random.default_rng(page)
    rows, width = len(state.position), -(-320 // page)
    num_pages = rows * width + 7
    table = rng.permutation(np.arange(1, num_pages))[: rows * width].reshape(rows, width).astype(np.int32)

    def layer(old: KDAState | MLAState) -> KDAState | PagedMLAState:
        if isinstance(old, KDAState):
            return old
        latent = np.full((num_pages, page, old.latent.shape[-1]), np.nan, np.float32)
        for row, count in enumerate(np.asarray(old.position)):
            at = np.arange(count)
            latent[table[row, at // page], at % page] = np.asarray(old.latent)[row, :count]
        return PagedMLAState(jnp.asarray(latent), jnp.asarray(table), old.position)

    return PooledState(tuple(layer(old) for old in state.layers))


def assert_same(want: ModelState, got: PooledState) -> None:
    """Bit-equal in everything alive."""
    for a, b in zip(want.layers, got.layers, strict=True):
        np.testing.assert_array_equal(a.position, b.position)
        if isinstance(a, KDAState):
            rows = b.slots if isinstance(b, SlottedKDAState) else jnp.arange(len(a.position))
            assert not isinstance(b, PagedMLAState)
            np.testing.assert_array_equal(a.recurrent, b.recurrent[rows])
            np.testing.assert_array_equal(a.conv, b.conv[rows])
            continue
        assert isinstance(b, PagedMLAState)
        size = b.latent.shape[1]
        for row, count in enumerate(np.asarray(a.position)):
            at = np.arange(count)
            np.testing.assert_array_equal(
                a.latent[row, :count], b.latent[np.asarray(b.table)[row, at // size], at % size]
            )


def slotted(state: PooledState, slots: list[int], num_slots: int) -> PooledState:
    """The state with KDA's rows in slots, NaN elsewhere; a negative slot is a row of padding."""

    def spread(rows: jax.Array) -> jax.Array:
        pool = jnp.full((num_slots, *rows.shape[1:]), jnp.nan, rows.dtype)
        return pool.at[jnp.asarray([s % 99 for s in slots])].set(rows, mode="drop")

    return PooledState(
        tuple(
            SlottedKDAState(
                spread(old.recurrent), spread(old.conv), jnp.asarray(slots, jnp.int32), old.position
            )
            if isinstance(old, KDAState)
            else old
            for old in state.layers
        )
    )


@pytest.mark.slow
def test_pages_have_the_bits_of_one_piece(parts: SplitModel) -> None:
    tokens = np.random.default_rng(0).integers(0, 67, (ROWS, 192))
    paged = pooled(empty(small_config(**OPTIONS), ROWS, 320), 16)
    logits, state = prefill(parts, tokens[:, :128], capacity=320)
    for at in (0, 64):
        got, paged = read(
            *parts, jnp.asarray(tokens[:, at : at + 64]), paged, jnp.full((ROWS,), 64, jnp.int32)
        )
        np.testing.assert_array_equal(logits[:, at : at + 64], got)
    assert_same(state, paged)

    lengths = jnp.asarray([64, 1, 30], jnp.int32)
    logits, state = prefill(parts, tokens[:, 128:], state, lengths, capacity=320)
    got, paged = read(*parts, jnp.asarray(tokens[:, 128:]), paged, lengths)
    for row, count in enumerate(lengths):
        np.testing.assert_array_equal(logits[row, :count], got[row, :count])
    assert_same(state, paged)

    paged = slotted(paged, [3, 1, 4], 6)
    for _ in range(20):
        token = jnp.argmax(logits[:, -1] if logits.ndim == 3 else logits, axis=-1).astype(jnp.int32)
        logits, state = decode(parts, np.asarray(token), state)
        got, paged = read(*parts, token[:, None], paged, None)
        np.testing.assert_array_equal(logits, got[:, 0])
    assert_same(state, paged)


@pytest.mark.parametrize(("count", "rows"), [(64, [64, 0, 5]), (1, None)], ids=["chunk", "token"])
def test_only_new_rows_and_page_0_are_written(parts: SplitModel, count: int, rows: list[int] | None) -> None:
    tokens = np.random.default_rng(1).integers(0, 67, (ROWS, TOKENS))
    before = pooled(prefill(parts, tokens[:, :100], capacity=320)[1], 16)
    if rows is None:
        before = slotted(before, [2, -1, 5], 6)
        before = PooledState(
            tuple(
                old._replace(table=old.table.at[1].set(0), position=old.position.at[1].set(0))
                if isinstance(old, PagedMLAState)
                else old._replace(position=old.position.at[1].set(0))
                for old in before.layers
            )
        )
    lengths = None if rows is None else jnp.asarray(rows, jnp.int32)
    _, after = read(*parts, jnp.asarray(tokens[:, 100 : 100 + count]), before, lengths)
    for old, new in zip(before.layers, after.layers, strict=True):
        if isinstance(old, SlottedKDAState):
            assert isinstance(new, SlottedKDAState)
            np.testing.assert_array_equal(
                np.delete(old.recurrent, [2, 5], 0), np.delete(new.recurrent, [2, 5], 0)
            )
            np.testing.assert_array_equal(np.delete(old.conv, [2, 5], 0), np.delete(new.conv, [2, 5], 0))
        if isinstance(old, PagedMLAState):
            assert isinstance(new, PagedMLAState)
            may = np.zeros(old.latent.shape[:2], bool)
            may[0] = True
            for row, more in enumerate(rows or [1, 0, 1]):
                at = np.arange(100, 100 + more)
                may[np.asarray(old.table)[row, at // 16], at % 16] = True
            np.testing.assert_array_equal(np.asarray(old.latent)[~may], np.asarray(new.latent)[~may])
            assert np.isfinite(np.asarray(new.latent)[may][16:]).all(), "the new rows are there"


@pytest.mark.parametrize(("count", "lengths"), [(1, [1, 1, 1]), (2, None)], ids=["lengths", "boundaries"])
def test_states_in_slots_take_tokens_or_drafts(
    parts: SplitModel, count: int, lengths: list[int] | None
) -> None:
    state = slotted(pooled(prefill(parts, [[1, 2]] * ROWS, capacity=320)[1], 64), [1, 2, 3], 4)
    tokens, cuts = jnp.ones((ROWS, count), jnp.int32), None if lengths else jnp.ones((ROWS, 1), jnp.int32)
    counts = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    with pytest.raises(ValueError, match=f"one token a row without lengths, or drafts.* got {count} tokens"):
        jax.eval_shape(nnx.merge(*parts), tokens, state, counts, cuts)
