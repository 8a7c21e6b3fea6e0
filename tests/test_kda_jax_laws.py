"""The laws of split, batch and causality, and of resuming: for each layer and the whole model, to the bit.

Prefill calls that are cut on the chunk grid promise bits; other cuts, and decoding, promise rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax.config import ModelConfig
from kda_jax.forward import SplitModel, decode, prefill, split
from kda_jax.layers import KimiDeltaAttention, MultiHeadLatentAttention
from kda_jax.state import KDAState, ModelState
from measure import assert_close
from random_model import random_model, small_config
from same_state import assert_same_state

pytestmark = pytest.mark.optimised

TOKENS, CAPACITY, ROWS = 200, 256, 6
ROUNDING = 5e-6
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 200)
GRID_CUTS = (64, 128, 192)
MODELS: dict[str, dict[str, Any]] = {
    "softplus": dict(num_experts=8, num_expert_groups=2, topk_groups=1),
    "bounded": dict(
        gate_lower_bound=-5.0, full_rank_gate=True, mla_output_gate=True, q_lora_rank=10, kda_num_v_heads=4
    ),
}


class Whole:
    """A model, some tokens, and what one call makes of them."""

    def __init__(self, config: ModelConfig) -> None:
        self.parts: SplitModel = split(random_model(config))
        self.tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, TOKENS))
        self.logits, self.end = self.read(self.tokens)

    def read(
        self, tokens: np.ndarray, state: ModelState | None = None, **options: Any
    ) -> tuple[np.ndarray, Any, *tuple[Any, ...]]:
        logits, end, *at = prefill(self.parts, tokens, state, capacity=CAPACITY, **options)
        return np.asarray(logits), end, *at


@pytest.fixture(scope="module", params=MODELS.values(), ids=list(MODELS))
def whole(request: pytest.FixtureRequest) -> Whole:
    return Whole(small_config(**request.param))


@pytest.mark.parametrize("cut", GRID_CUTS)
def test_a_prefill_cut_on_the_grid_has_the_bits_of_one_call(whole: Whole, cut: int) -> None:
    first, state = whole.read(whole.tokens[:, :cut])
    second, end = whole.read(whole.tokens[:, cut:], state)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole.logits)
    assert_same_state(whole.end, end)


@pytest.mark.parametrize("cut", [1, 2, 3, 15, 16, 17, 63, 65, 100, 199])
def test_a_prefill_cut_elsewhere_is_the_same_within_rounding(whole: Whole, cut: int) -> None:
    _, state = whole.read(whole.tokens[:, :cut])
    second, end = whole.read(whole.tokens[:, cut:], state)
    assert_close("logits", whole.logits[:, cut:], second, ROUNDING)
    for want, got in zip(whole.end.layers, end.layers):
        if isinstance(want, KDAState):
            assert_close("recurrent", want.recurrent, got.recurrent, ROUNDING)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_beginning_has_the_bits_it_has_in_the_whole(whole: Whole, length: int) -> None:
    logits, _ = whole.read(whole.tokens[:, :length])
    np.testing.assert_array_equal(logits, whole.logits[:, :length])


def test_a_row_has_the_bits_it_has_alone(whole: Whole) -> None:
    for row in (0, ROWS - 1):
        logits, end = whole.read(whole.tokens[row : row + 1])
        np.testing.assert_array_equal(logits[0], whole.logits[row])
        assert_same_state(whole.end, end, slice(row, row + 1))


def test_rows_that_end_at_different_lengths_are_the_rows_alone(whole: Whole) -> None:
    counts = [TOKENS, 65, 1, 0, 127, 64]
    padded = np.random.default_rng(1).integers(0, 60, whole.tokens.shape)
    for row, count in enumerate(counts):
        padded[row, :count] = whole.tokens[row, :count]
    logits, end = whole.read(padded, lengths=counts)
    last, _ = whole.read(padded, lengths=counts, last_only=True)
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(logits[row, :count], whole.logits[row, :count])
        if count:
            np.testing.assert_array_equal(last[row, 0], whole.logits[row, count - 1])
            _, all_rows = whole.read(whole.tokens[:, :count])
            alone = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], all_rows)
            assert_same_state(end, alone, slice(row, row + 1))
    assert not any(np.asarray(leaf[3]).any() for leaf in jax.tree.leaves(end)), "a row without tokens"


def test_a_row_of_padding_leaves_its_state_alone(whole: Whole) -> None:
    _, state = whole.read(whole.tokens[:, :70])
    _, end = whole.read(whole.tokens[:, 70:140], state, lengths=[70] + [0] * (ROWS - 1))
    _, alone = whole.read(whole.tokens[:, 70:140], state)
    assert_same_state(alone, jax.tree.map(lambda leaf: leaf[:1], end), slice(0, 1))
    assert_same_state(state, jax.tree.map(lambda leaf: leaf[1:], end), slice(1, ROWS))


@pytest.mark.parametrize("first_changed", [1, 15, 64, 100, 199])
def test_no_token_changes_what_comes_before_it(whole: Whole, first_changed: int) -> None:
    tokens = whole.tokens.copy()
    tokens[:, first_changed:] = (tokens[:, first_changed:] + 7) % 60
    logits, _ = whole.read(tokens)
    np.testing.assert_array_equal(logits[:, :first_changed], whole.logits[:, :first_changed])
    assert (logits[:, first_changed:] != whole.logits[:, first_changed:]).any(axis=-1).all()


def test_states_at_boundaries_are_those_of_calls_that_end_there(whole: Whole) -> None:
    boundaries = [1, 63, 64, 65, 100, 199]
    logits, end, checkpoints = whole.read(whole.tokens, boundaries=boundaries)
    np.testing.assert_array_equal(logits, whole.logits)
    assert_same_state(whole.end, end)
    for boundary, checkpoint in zip(boundaries, checkpoints, strict=True):
        _, alone = whole.read(whole.tokens[:, :boundary])
        assert_same_state(alone, checkpoint)


def test_resuming_on_the_grid_has_the_bits_of_never_stopping(whole: Whole) -> None:
    _, state = whole.read(whole.tokens[:, :64])
    _, _, checkpoints = whole.read(whole.tokens[:, 64:], state, boundaries=[192, 128])
    for cut, checkpoint in zip((192, 128), checkpoints, strict=True):
        logits, end = whole.read(whole.tokens[:, cut:], checkpoint)
        np.testing.assert_array_equal(logits, whole.logits[:, cut:])
        assert_same_state(whole.end, end)


def test_decoding_goes_on_where_prefill_stopped(whole: Whole) -> None:
    _, state = whole.read(whole.tokens[:, :62])
    before = jax.tree.map(np.array, state)
    now = state
    for at in range(62, 67):
        logits, now = decode(whole.parts, whole.tokens[:, at], now)
        assert_close("logits", whole.logits[:, at], logits, ROUNDING)
    second, _ = whole.read(whole.tokens[:, 67:], now)
    assert_close("logits", whole.logits[:, 67:], second, ROUNDING)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))


@pytest.mark.parametrize("whole", [MODELS["softplus"]], ids=["softplus"], indirect=True)
def test_the_call_that_training_makes_is_the_same_within_rounding(whole: Whole) -> None:
    graphdef, params = whole.parts
    logits, end = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))(params, jnp.asarray(whole.tokens))
    assert_close("logits", whole.logits, logits, ROUNDING)
    assert end.position.tolist() == [TOKENS] * ROWS


@pytest.mark.parametrize("whole", [MODELS["bounded"]], ids=["bounded"], indirect=True)
def test_under_a_callers_jit_prefill_and_decode_are_the_same_within_rounding(whole: Whole) -> None:
    graphdef, params = whole.parts

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, list[ModelState]]:
        model = nnx.merge(graphdef, params)
        logits, state, checkpoints = prefill(model, tokens[:, :70], boundaries=[64], capacity=71)
        return logits, decode(model, tokens[:, 70], state)[0], checkpoints

    logits, after, checkpoints = run(params, jnp.asarray(whole.tokens))
    assert_close("prefill", whole.logits[:, :70], logits, ROUNDING)
    assert_close("decode", whole.logits[:, 70], after, ROUNDING)
    assert checkpoints[0].position.tolist() == [64] * ROWS


LAYERS: dict[str, Any] = {
    "kda-softplus": lambda: KimiDeltaAttention(24, 2, 8, rngs=nnx.Rngs(0)),
    "kda-bounded": lambda: KimiDeltaAttention(
        24, 2, 8, gate_lower_bound=-5.0, num_v_heads=4, v_head_dim=6, rngs=nnx.Rngs(0)
    ),
    "mla": lambda: MultiHeadLatentAttention(
        24, 3, kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=6, rngs=nnx.Rngs(0)
    ),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_layer_keeps_the_laws_by_itself(make: Any) -> None:
    layer = make()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 128, 24)), jnp.float32)
    start = layer.empty(3, *([128] if isinstance(layer, MultiHeadLatentAttention) else []))
    program = jax.jit(lambda x, state, lengths: layer(x, state, lengths=lengths))

    def run(x: jax.Array, state: Any, lengths: Any = None) -> Any:
        return program(x, state, jnp.full(x.shape[0], x.shape[1], jnp.int32) if lengths is None else lengths)

    whole, end = run(x, start)
    first, state = run(x[:, :64], start)
    second, after = run(x[:, 64:], state)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
    jax.tree.map(np.testing.assert_array_equal, end, after)
    changed = x.at[:, 100:].multiply(jnp.float32(-3))
    np.testing.assert_array_equal(run(changed, start)[0][:, :100], whole[:, :100])
    counts = jnp.asarray([128, 70, 0], jnp.int32)
    ragged, after = run(x, start, counts)
    alone, state = run(x[1:2], jax.tree.map(lambda leaf: leaf[1:2], start), counts[1:2])
    np.testing.assert_array_equal(ragged[0], whole[0])
    np.testing.assert_array_equal(ragged[1, :70], whole[1, :70])
    np.testing.assert_array_equal(ragged[1, :70], alone[0, :70])
    for want, got in zip(after, state):
        np.testing.assert_array_equal(want[1], got[0])
    assert not any(np.asarray(leaf[2]).any() for leaf in after)


@pytest.mark.slow
def test_the_tiny_models_prefill_cut_on_the_grid_has_the_bits_of_one_call() -> None:
    tiny = Whole(ModelConfig.tiny())
    for cut in GRID_CUTS:
        first, state = tiny.read(tiny.tokens[:, :cut])
        second, end = tiny.read(tiny.tokens[:, cut:], state)
        np.testing.assert_array_equal(np.concatenate([first, second], axis=1), tiny.logits)
        assert_same_state(tiny.end, end)


@pytest.mark.slow
def test_at_real_head_sizes_boundaries_change_no_bit() -> None:
    """Sums over 64 channels are long enough for XLA to order them by the program they stand in."""
    config = dataclasses.replace(ModelConfig.tiny(), layers=("kda", "mla"), mlps=("dense", "moe"))
    parts, tokens = split(random_model(config)), np.random.default_rng(5).integers(0, 256, (1, 700))
    logits, end = prefill(parts, tokens)
    boundaries = [300, 64, 640]
    with_boundaries, same_end, checkpoints = prefill(parts, tokens, boundaries=boundaries)
    np.testing.assert_array_equal(np.asarray(with_boundaries), np.asarray(logits))
    assert_same_state(end, same_end)
    for boundary, checkpoint in zip(boundaries, checkpoints, strict=True):
        _, alone = prefill(parts, tokens, lengths=[boundary])
        assert_same_state(alone, checkpoint)
