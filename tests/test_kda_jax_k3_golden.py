"""Kimi K3's tiny model against another implementation's run of the same checkpoint, and what that comparison sees."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import layer_definitions as definition
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kda_jax.forward import prefill
from kda_jax.layers import Residuals, SparseMoE
from kda_jax.model import Block, Model
from kda_jax.weights import load
from kda_jax.weights.transforms import TRANSFORMS
from measure import assert_close
from pallas_kernels import rms_norm

Arrays = dict[str, np.ndarray]
LAYERS, BLOCK_SIZE = 6, 2
ABSOLUTE, RELATIVE = 3e-4, 2e-5  # of the logits; the golden lies 1.9e-4 and 9e-6 from a float64 run
OF_A_LAYER = 3e-6  # relative, from its golden input
MOE = "language_model.model.layers.{}.block_sparse_moe."


@pytest.fixture(scope="module")
def want(golden: Callable[[str], Arrays]) -> Arrays:
    return golden("kimi_k3_tiny/golden.safetensors")


@pytest.fixture(scope="module")
def model(goldens: Path) -> Model:
    return load(goldens / "kimi_k3_tiny")


@functools.partial(jax.jit, static_argnames="graphdef")
def run(graphdef: nnx.GraphDef[Block], params: nnx.State, x: Residuals) -> tuple[jax.Array, ...]:
    block = nnx.merge(graphdef, params)
    assert block.attn_mix is not None
    normal = rms_norm(block.attn_mix(x), block.input_norm[...], eps=block.eps)
    return normal, block.attn(normal)[0], block(x)[0].sum


def residuals(model: Model, want: Arrays, index: int) -> Residuals:
    """What the golden run hands to a layer: the sum so far, and what it was where blocks of layers began."""
    sums = [np.asarray(model.embed[...])[want["input_ids"]]]
    sums += [want[f"layers.{i}.hidden"] for i in range(LAYERS)]
    blocks = [jnp.asarray(sums[i]) for i in range(0, index, BLOCK_SIZE)]
    return Residuals(jnp.asarray(sums[index]), jnp.stack(blocks) if blocks else None)


def check_layer(model: Model, want: Arrays, index: int) -> None:
    got = run(*nnx.split(model.layers[index]), residuals(model, want, index))
    for part, value in zip(("attn.in", "attn.out", "hidden"), got):
        name = f"layers.{index}.{part}"
        assert_close(name, want[name], value, OF_A_LAYER)


def check_router(model: Model, want: Arrays) -> None:
    """The weights by themselves: behind the experts stands a norm, which hides their scale."""
    moe = model.layers[1].mlp
    assert isinstance(moe, SparseMoE)
    x = want["layers.1.attn.in"]
    routing = moe.route(jnp.asarray(x))
    scores = definition.sigmoid(definition.wide(x) @ definition.wide(moe.router.kernel))
    chosen = np.take_along_axis(scores, np.asarray(routing.experts), axis=-1)
    assert_close("weights", chosen / chosen.sum(-1, keepdims=True), routing.weights, 1e-6)


def test_logits_and_the_last_hidden_state(model: Model, want: Arrays) -> None:
    logits, _ = prefill(model, want["input_ids"])
    assert np.abs(np.asarray(logits) - want["logits"]).max() < ABSOLUTE
    assert_close("logits", want["logits"], logits, RELATIVE)
    assert model.mix is not None
    hidden = rms_norm(model.mix(residuals(model, want, LAYERS)), model.norm[...], eps=1e-5)
    assert_close("final_hidden", want["final_hidden"], hidden, OF_A_LAYER)


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 36])
def test_logits_of_two_calls_are_the_golden_ones_too(model: Model, want: Arrays, cut: int) -> None:
    ids = want["input_ids"]
    first, state = prefill(model, ids[:, :cut])
    second, _ = prefill(model, ids[:, cut:], state)
    logits = np.concatenate([first, second], axis=1)
    assert np.abs(logits - want["logits"]).max() < ABSOLUTE
    assert_close("logits", want["logits"], logits, RELATIVE)


@pytest.mark.parametrize("index", range(LAYERS))
def test_each_layer_makes_of_its_golden_input_its_golden_output(
    model: Model, want: Arrays, index: int
) -> None:
    check_layer(model, want, index)


def test_the_routers_weights(model: Model, want: Arrays) -> None:
    check_router(model, want)


def rewritten(goldens: Path, folder: Path, fields: dict[str, Any], change: Callable[[Arrays], Any]) -> Model:
    """The golden checkpoint with one thing changed: fields of its config, or its tensors."""
    source = goldens / "kimi_k3_tiny"
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    text |= {key: value for key, value in fields.items() if key in text}
    text["linear_attn_config"] |= {key: value for key, value in fields.items() if key not in text}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return load(folder)


def drop(part: str) -> Callable[[Arrays], Any]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


def drop_mla_gates(tensors: Arrays) -> None:
    for layer in (3, 5):
        del tensors[f"language_model.model.layers.{layer}.self_attn.g_proj.weight"]


def forget_correction(tensors: Arrays) -> None:
    for layer in range(1, LAYERS):
        tensors[MOE.format(layer) + "gate.e_score_correction_bias"][:] = 0


def swap_nibbles(tensors: Arrays) -> None:
    for name, value in tensors.items():
        if name.endswith("weight_packed"):
            tensors[name] = value >> 4 | value << 4


def nothing(tensors: Arrays) -> None:
    pass


MUTANTS: dict[str, tuple[dict[str, Any], Callable[[Arrays], Any], int]] = {
    "gate kind": ({"gate_lower_bound": None}, nothing, 0),
    "gate bound": ({"gate_lower_bound": -4.9}, nothing, 0),
    "block size": ({"attn_res_block_size": 3}, nothing, 2),
    "latent norm": ({"latent_moe_use_norm": False}, drop("routed_expert_norm"), 1),
    "mla gate": ({"mla_use_output_gate": False}, drop_mla_gates, 3),
    "situ bound of the gate": ({"activation_situ_beta": 1e4}, nothing, 0),
    "situ bound of the rest": ({"activation_situ_linear_beta": 1e4}, nothing, 0),
    "correction bias": ({}, forget_correction, 1),
    "nibble order": ({}, swap_nibbles, 1),
}


@pytest.mark.parametrize(("fields", "change", "layer"), MUTANTS.values(), ids=MUTANTS)
def test_a_layer_with_one_thing_changed_is_seen(
    fields: dict[str, Any],
    change: Callable[[Arrays], Any],
    layer: int,
    goldens: Path,
    want: Arrays,
    tmp_path: Path,
) -> None:
    mutant = rewritten(goldens, tmp_path, fields, change)
    with pytest.raises(AssertionError, match=r"layers\.\d\.\S+: relative error"):
        check_layer(mutant, want, layer)


def test_heads_read_from_the_wrong_end_of_a_padded_a_log_are_seen(
    goldens: Path, want: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = TRANSFORMS["heads"]._replace(to_ours=lambda x, config: (x.reshape(-1)[-config.kda_value_heads :],))
    monkeypatch.setitem(TRANSFORMS, "heads", last)
    mutant = load(goldens / "kimi_k3_tiny")
    with pytest.raises(AssertionError, match=r"layers.0.attn.out: relative error"):
        check_layer(mutant, want, 0)


@pytest.mark.parametrize(
    "fields", [{"routed_scaling_factor": 2.446}, {"moe_renormalize": False}], ids=["scale", "sum"]
)
def test_other_weights_of_the_experts_are_seen(
    fields: dict[str, Any], goldens: Path, want: Arrays, tmp_path: Path
) -> None:
    mutant = rewritten(goldens, tmp_path, fields, nothing)
    with pytest.raises(AssertionError, match="weights: relative error"):
        check_router(mutant, want)
