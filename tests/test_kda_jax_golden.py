"""Kimi Linear against transformers' run of the same weights, and against the float64 run of the same formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax.forward import SplitModel, decode, prefill, split
from kda_jax.layers import MultiHeadLatentAttention, Residuals
from kda_jax.model import Block, Model
from kda_jax.state import KDAState, ModelState
from kda_jax.weights import load
from measure import relative_error
from pallas_kernels import rms_norm

ABSOLUTE = 1e-4
RELATIVE = 1e-5
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def model(goldens: Path) -> Model:
    return load(goldens / "kimi_linear_tiny")


@pytest.fixture(scope="module")
def parts(model: Model) -> SplitModel:
    return split(model)


@pytest.fixture(scope="module")
def want(golden: Callable[[str], Arrays]) -> Arrays:
    return golden("kimi_linear_tiny/golden.safetensors")


def assert_near(name: str, want: np.ndarray, got: jax.Array | np.ndarray) -> None:
    assert want.shape == got.shape, name
    assert np.abs(np.asarray(got) - want).max() < ABSOLUTE, name


def assert_state(want: Arrays, prefix: str, state: ModelState, tokens: int) -> None:
    assert state.position.tolist() == [tokens] * 2
    for index, layer in enumerate(state.layers):
        name = f"{prefix}.{index}"
        if isinstance(layer, KDAState):
            assert_near(f"{name}.recurrent", want[f"{name}.recurrent"], layer.recurrent)
            # The golden keeps the last four inputs [B, C, 4], of which the next token meets three.
            assert_near(f"{name}.conv", want[f"{name}.conv"][:, :, 1:].swapaxes(1, 2), layer.conv)
        else:
            latent = np.concatenate([want[f"{name}.kv_latent"], want[f"{name}.k_rot"]], axis=-1)[:, 0]
            assert_near(f"{name}.latent", latent, layer.latent[:, :tokens])


def test_logits(parts: SplitModel, want: Arrays) -> None:
    logits, state = prefill(parts, want["input_ids"])
    assert_near("logits", want["logits"], logits)
    assert relative_error(want["logits_fp64"], logits) < RELATIVE
    last, _ = prefill(parts, want["input_ids"], last_only=True)
    assert_near("last", want["logits"][:, -1:], last)
    assert_state(want, "cache_end", state, 75)


@pytest.mark.parametrize("index", range(5))
def test_each_layer_makes_of_its_golden_input_its_golden_output(
    model: Model, want: Arrays, index: int
) -> None:
    name = f"act.layers.{index}"
    graphdef, params = nnx.split(model.layers[index])

    @jax.jit
    def run(params: nnx.State, x: jax.Array, attn_in: jax.Array, mlp_in: jax.Array) -> tuple[jax.Array, ...]:
        block: Block = nnx.merge(graphdef, params)
        normal = rms_norm(x, block.input_norm[...], eps=block.eps)
        return normal, block.attn(attn_in)[0], block.mlp(mlp_in), block(Residuals(x))[0].sum

    x, attn_in, mlp_in = (jnp.asarray(want[name + part]) for part in (".in", ".self_attn.in", ".mlp.in"))
    got = run(params, x, attn_in, mlp_in)
    for part, value in zip((".self_attn.in", ".self_attn.out", ".mlp.out", ".out"), got):
        assert_near(name + part, want[name + part], value)


def test_prefill_then_decode(parts: SplitModel, want: Arrays) -> None:
    ids = want["input_ids"]
    logits, state = prefill(parts, ids[:, :70], capacity=75)
    assert_near("prefill", want["prefill.logits"], logits)
    assert_state(want, "cache_prefill", state, 70)
    for step in range(5):
        logits, state = decode(parts, ids[:, 70 + step], state)
        assert_near(f"decode {step}", want["decode.logits"][:, step], logits)
    assert_state(want, "cache_end", state, 75)


def test_a_state_at_a_boundary_is_the_golden_prefix(parts: SplitModel, want: Arrays) -> None:
    _, end, checkpoints = prefill(parts, want["input_ids"], boundaries=[70, 75])
    assert_state(want, "cache_prefill", checkpoints[0], 70)
    assert_state(want, "cache_end", checkpoints[1], 75)
    assert_state(want, "cache_end", end, 75)


def test_a_row_that_was_padded_on_the_left_is_the_row_alone(parts: SplitModel, want: Arrays) -> None:
    live = want["leftpad.attention_mask"].astype(bool)
    counts = live.sum(axis=1)
    ids = np.zeros_like(want["input_ids"])
    for row, mask in enumerate(live):
        ids[row, : counts[row]] = want["input_ids"][row, mask]
    logits, _ = prefill(parts, ids, lengths=counts)
    assert counts.min() < counts.max()
    for row, mask in enumerate(live):
        assert_near(f"row {row}", want["leftpad.logits"][row, mask], logits[row, : counts[row]])


def test_latent_norms_have_their_own_eps(model: Model, want: Arrays) -> None:
    """Latents a thousand times smaller: eps 1e-5 in their norm would change the logits by 0.21."""
    attn = model.layers[3].attn
    assert isinstance(attn, MultiHeadLatentAttention)
    start = attn.in_proj.sizes[0]
    kernel = attn.in_proj.kernel[...]
    small = kernel.at[:, start : start + attn.rank].multiply(jnp.float32(1e-3))
    graphdef, params = nnx.split(model)
    params["layers"][3]["attn"]["in_proj"]["kernel"] = nnx.Param(small)
    logits, _ = prefill((graphdef, params), want["input_ids"])
    assert_near("smalllatent", want["smalllatent.logits"], logits)
    assert relative_error(want["smalllatent.logits"], logits) < RELATIVE
