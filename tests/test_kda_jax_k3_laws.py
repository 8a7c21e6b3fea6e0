"""The laws of split, batch, causality and resuming for a model with all of Kimi K3's parts.

Its layers read the sums of whole blocks of layers, token by token: a call needs none of them from the calls before it.
Calls cut between the chunks of the grid promise bits, calls cut inside one promise rounding, and so does decoding.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from kda_jax.forward import decode, prefill, split
from kda_jax.state import ModelState, empty
from measure import assert_close
from random_model import K3, random_model, small_config
from same_state import assert_same_state

pytestmark = pytest.mark.optimised

TOKENS, ROWS = 128, 3
ROUNDING = 1e-5  # mixing by content amplifies it
CONFIG = small_config(**K3)


class Whole:
    """A model, some tokens, and what one call makes of them."""

    def __init__(self) -> None:
        self.parts = split(random_model(CONFIG))
        self.tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, TOKENS))
        self.logits, self.end, *self.at = self.read(self.tokens)

    def read(
        self, tokens: np.ndarray, state: ModelState | None = None, **options: Any
    ) -> tuple[np.ndarray, ModelState, *tuple[ModelState, ...]]:
        """Logits, the end, and of longer calls the states at 64 and 100 too: one program does for all of them."""
        if tokens.shape[1] > 64:
            start = 0 if state is None else int(state.position[0])
            options["boundaries"] = [max(64, start + 1), min(100, start + tokens.shape[1])]
        logits, end, *at = prefill(self.parts, tokens, state, capacity=TOKENS, **options)
        return np.asarray(logits), end, *(at[0] if at else ())


@pytest.fixture(scope="module")
def whole() -> Whole:
    return Whole()


def test_the_state_has_nothing_of_residual_blocks(whole: Whole) -> None:
    plain = small_config(**K3 | {"attn_res_block_size": None})
    wanted = jax.eval_shape(lambda: empty(plain, ROWS, TOKENS))
    assert [leaf.shape for leaf in jax.tree.leaves(whole.end)] == [
        leaf.shape for leaf in jax.tree.leaves(wanted)
    ]


def test_a_prefill_cut_between_chunks_has_the_bits_of_one_call(whole: Whole) -> None:
    first, state = whole.read(whole.tokens[:, :64])
    second, end = whole.read(whole.tokens[:, 64:], state)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole.logits)
    assert_same_state(whole.end, end)


@pytest.mark.parametrize("cut", [1, 37, 63, 65, 100, 127])
def test_a_prefill_cut_inside_a_chunk_is_the_same_within_rounding(whole: Whole, cut: int) -> None:
    first, state, *_ = whole.read(whole.tokens[:, :cut])
    np.testing.assert_array_equal(first, whole.logits[:, :cut])
    second, end, *_ = whole.read(whole.tokens[:, cut:], state)
    assert_close("logits", whole.logits[:, cut:], second, ROUNDING)
    for name, want, got in zip(("recurrent", "conv"), whole.end.layers[1], end.layers[1]):
        assert_close(name, want, got, ROUNDING)


def test_a_row_has_the_bits_it_has_alone_and_padding_changes_nothing(whole: Whole) -> None:
    _, stopped = whole.read(whole.tokens[:, :64])
    _, alone = whole.read(whole.tokens[1:2, :50])
    padded = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (ROWS, 64))
    counts = [64, 50, 0]
    for row, count in enumerate(counts):
        padded[row, :count] = whole.tokens[row, :count]
    logits, end = whole.read(padded, lengths=counts)
    np.testing.assert_array_equal(logits[0], whole.logits[0, :64])
    np.testing.assert_array_equal(logits[1, :50], whole.logits[1, :50])
    assert_same_state(stopped, jax.tree.map(lambda leaf: leaf[:1], end), slice(0, 1))
    assert_same_state(end, alone, slice(1, 2))
    assert not any(np.asarray(leaf[2]).any() for leaf in jax.tree.leaves(end)), "a row without tokens"


@pytest.mark.parametrize("first_changed", [1, 40, 64, 127])
def test_no_token_changes_what_comes_before_it(whole: Whole, first_changed: int) -> None:
    tokens = whole.tokens.copy()
    tokens[:, first_changed:] = (tokens[:, first_changed:] + 7) % CONFIG.vocab_size
    logits, *_ = whole.read(tokens)
    np.testing.assert_array_equal(logits[:, :first_changed], whole.logits[:, :first_changed])
    assert (logits[:, first_changed:] != whole.logits[:, first_changed:]).any(axis=-1).all()


def test_resuming_from_a_checkpoint_has_the_bits_of_never_stopping(whole: Whole) -> None:
    between, inside = whole.at
    for cut, checkpoint in ((64, between), (100, inside)):
        _, live, *_ = whole.read(whole.tokens[:, :cut])
        assert_same_state(live, checkpoint)
        went_on, want = whole.read(whole.tokens[:, cut:], live)
        resumed, got = whole.read(whole.tokens[:, cut:], checkpoint)
        np.testing.assert_array_equal(went_on, resumed)
        assert_same_state(want, got)
        if cut == 64:
            np.testing.assert_array_equal(resumed, whole.logits[:, cut:])
            assert_same_state(whole.end, got)


def test_decoding_goes_on_where_prefill_stopped(whole: Whole) -> None:
    _, state = whole.read(whole.tokens[:, :62])
    before = jax.tree.map(np.array, state)
    now = state
    for at in range(62, 66):
        logits, now = decode(whole.parts, whole.tokens[:, at], now)
        assert_close("logits", whole.logits[:, at], logits, ROUNDING)
    second, _ = whole.read(whole.tokens[:, 66:], now)
    assert_close("logits", whole.logits[:, 66:], second, ROUNDING)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))
