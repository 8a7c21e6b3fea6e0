"""The table of tensors, and Hugging Face checkpoints in and out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kda_jax.config import ModelConfig
from kda_jax.forward import prefill
from kda_jax.model import Model
from kda_jax.weights import WeightsError, load, save
from kda_jax.weights.names import hf_shapes, parameters_and_nbytes, tensors
from kda_jax.weights.skeleton import parameters, shapes
from measure import assert_close
from random_model import K3, random_model, small_config

CONFIGS = {
    "plain": {},
    "grouped values": {"kda_num_v_heads": 4, "kda_v_head_dim": 5},
    "low-rank query": {"q_lora_rank": 9},
    "bounded, full gate": {"gate_lower_bound": -5.0, "full_rank_gate": True, "mla_output_gate": True},
    "tied": {"tie_embeddings": True},
    "no shared expert": {"num_shared_experts": 0},
    "dense only": {
        "mlps": ("dense", "dense"),
        "num_experts": 0,
        "experts_per_token": 0,
        "moe_intermediate_size": 0,
    },
    "k3": K3,
    "k3, plain experts": K3 | {"quantization": None},
    "experts on latents": {"routed_expert_hidden_size": 9},
    "long conv": {"conv_size": 6, "layers": ("mla", "kda"), "mlps": ("moe", "dense")},
}
configs = pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
Tensors = dict[str, np.ndarray]


def assert_same(want: Model, got: Model) -> None:
    old, new = parameters(want), parameters(got)
    assert {path: value.dtype for path, value in old.items()} == {
        path: value.dtype for path, value in new.items()
    }
    different = [path for path in old if not np.array_equal(np.asarray(old[path]), np.asarray(new[path]))]
    assert not different


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


@configs
def test_table_fills_every_element_of_every_parameter_once(changes: dict) -> None:
    config = small_config(**changes)
    counts = {path: np.zeros(shape.shape, np.int32) for path, shape in shapes(config).items()}
    for tensor in tensors(config):
        for target in tensor.targets:
            part = target.of(counts[target.path])
            part += 1
    assert {path: (count.min(), count.max()) for path, count in counts.items()} == dict.fromkeys(
        counts, (1, 1)
    )


@configs
def test_save_and_load_keep_every_bit(changes: dict, tmp_path: Path) -> None:
    model = random_model(small_config(**changes))
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.config == model.config
    assert_same(model, loaded)


@configs
def test_saved_names_and_shapes_are_the_tables(changes: dict, tmp_path: Path) -> None:
    model = random_model(small_config(**changes))
    save(model, tmp_path / "model")
    saved = {name: value.shape for name, value in load_file(tmp_path / "model" / "model.safetensors").items()}
    expected = {name: shape for name, (shape, _) in hf_shapes(model.config).items()}
    if model.config.tie_embeddings:  # transformers ties no head: it wants a copy
        expected["lm_head.weight"] = (67, 24)
    assert saved == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_is_kept_or_converted_and_small_tensors_stay_float32(dtype: str, tmp_path: Path) -> None:
    model = random_model(small_config(), dtype=dtype)
    save(model, tmp_path / "model")
    assert_same(model, load(tmp_path / "model"))
    wide = parameters(load(tmp_path / "model", dtype=jnp.float32))
    for path, value in parameters(model).items():
        small = path.endswith(("A_log", "dt_bias", "router.kernel", "router.bias"))
        assert value.dtype == (jnp.float32 if small else dtype), path
        assert wide[path].dtype == jnp.float32, path
        assert np.array_equal(np.asarray(value).astype(np.float32), np.asarray(wide[path])), path


def test_golden_checkpoint_gives_the_golden_logits(
    goldens: Path, golden: Callable[[str], dict[str, np.ndarray]]
) -> None:
    expected = golden("kimi_linear_tiny/golden.safetensors")
    model = load(goldens / "kimi_linear_tiny")
    logits, *_ = prefill(model, expected["input_ids"])
    assert_close("logits", expected["logits"], logits, 2e-5)


def test_large_checkpoints_are_spread_over_shards(tmp_path: Path) -> None:
    model = random_model(small_config())
    save(model, tmp_path / "whole")
    save(model, tmp_path / "shards", max_shard_nbytes=10_000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    for file in files:
        held = load_file(tmp_path / "shards" / file)
        assert sum(value.nbytes for value in held.values()) <= 10_000
        assert set(held) == {name for name, where in index["weight_map"].items() if where == file}
    assert_same(model, load(tmp_path / "shards"))


def _dense_as_transformers_writes_it(held: Tensors) -> Tensors:
    return {
        name.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): value for name, value in held.items()
    }


def _multimodal(held: Tensors) -> Tensors:
    vision = {"vision_tower.x": np.zeros(1), "mm_projector.y": np.zeros(1)}
    return {f"language_model.{name}": value for name, value in held.items()} | vision


def _a_log(shape: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    def change(held: Tensors) -> Tensors:
        name = "model.layers.0.self_attn.A_log"
        padded = np.zeros(np.prod(shape), np.float32)
        padded[:2] = held[name].reshape(-1)
        return held | {name: padded.reshape(shape)}

    return change


def _as_transformers_holds_it(held: Tensors) -> Tensors:
    """The names of the modules in memory: the gate's own module, one convolution, stacked experts."""
    attn, moe = "model.layers.0.self_attn.", "model.layers.1.block_sparse_moe."
    conv = np.concatenate([held.pop(f"{attn}{x}_conv1d.weight") for x in "qkv"])
    w1, w2, w3 = (np.stack([held.pop(f"{moe}experts.{e}.w{i}.weight") for e in range(4)]) for i in (1, 2, 3))
    gate = [
        name for name in held if any(part in name for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"))
    ]
    held |= {name.replace("self_attn.", "self_attn.forget_gate."): held.pop(name) for name in gate}
    held[f"{attn}conv1d.weight"] = conv
    held[f"{moe}experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
    held[f"{moe}experts.down_proj"] = w2
    return {name.replace("block_sparse_moe", "mlp"): value for name, value in held.items()}


@pytest.mark.parametrize(
    "spell",
    [
        _dense_as_transformers_writes_it,
        _multimodal,
        _a_log((2,)),
        _a_log((1, 1, 2, 1)),
        _a_log((128,)),
        _as_transformers_holds_it,
    ],
    ids=["dense layer", "language_model", "A_log [H]", "A_log [1,1,H,1]", "A_log padded", "fused"],
)
def test_every_spelling_of_a_checkpoint_is_read(spell: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    model = random_model(small_config())
    save(model, tmp_path / "model")
    rewrite(tmp_path / "model", spell)
    assert_same(model, load(tmp_path / "model"))


def test_a_tied_head_may_be_absent_and_must_be_the_embedding(tmp_path: Path) -> None:
    model = random_model(small_config(tie_embeddings=True))
    save(model, tmp_path / "model")
    rewrite(tmp_path / "model", lambda held: {name: held[name] for name in held if name != "lm_head.weight"})
    assert_same(model, load(tmp_path / "model"))
    rewrite(tmp_path / "model", lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"] + 1})
    with pytest.raises(WeightsError, match=r"lm_head.weight differs from the embedding"):
        load(tmp_path / "model")


def test_sizes_of_the_released_models() -> None:
    parameters, nbytes = parameters_and_nbytes(hf_shapes(ModelConfig.kimi_linear_48b()))
    assert (parameters, round(nbytes / 1e9, 1)) == (49_122_681_728, 98.2)
    k3 = hf_shapes(ModelConfig.kimi_k3())
    parameters, nbytes = parameters_and_nbytes(k3)
    assert (round(parameters / 1e12, 2), round(nbytes / 1e12, 2)) == (2.78, 1.56)
    layer, prefix = "language_model.model.layers.1.", "language_model.model."
    experts = f"{layer}block_sparse_moe.experts.895."
    expected = {
        f"{experts}w2.weight_packed": ((3584, 1536), "mxfp4"),
        f"{experts}w1.weight_scale": ((3072, 112), "e8m0"),
        f"{layer}block_sparse_moe.routed_expert_down_proj.weight": ((3584, 7168), "bf16"),
        f"{layer}block_sparse_moe.routed_expert_norm.weight": ((3584,), "bf16"),
        f"{layer}block_sparse_moe.shared_experts.up_proj.weight": ((6144, 7168), "bf16"),
        f"{layer}self_attn.g_proj.weight": ((12288, 7168), "bf16"),
        f"{layer}self_attn.A_log": ((128,), "f32"),
        f"{layer}mlp_res_proj.weight": ((1, 7168), "bf16"),
        f"{prefix}layers.92.self_attn.q_b_proj.weight": ((96 * 192, 1536), "bf16"),
        f"{prefix}output_attn_res_norm.weight": ((7168,), "bf16"),
        "language_model.lm_head.weight": ((163840, 7168), "bf16"),
    }
    assert {name: k3[name] for name in expected} == expected
    assert f"{layer}self_attn.g_a_proj.weight" not in k3
    assert f"{experts}w1.weight" not in k3


def test_a_model_has_the_parameters_of_its_checkpoint() -> None:
    config, codes = ModelConfig.kimi_k3(), {"packed": 2, "scale": 0}  # numbers for one element
    held = {
        path: math.prod(shape.shape) * codes.get(path.split(".")[-1], 1)
        for path, shape in shapes(config).items()
    }
    padding = 69 * (128 - 96)  # of A_log
    assert sum(held.values()) == parameters_and_nbytes(hf_shapes(config))[0] - padding


def test_failing_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        save_file(*args, **kwargs)
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["kda_jax.weights.save"], "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save(random_model(small_config()), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_save_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("x")
    with pytest.raises(ValueError, match="not an empty folder"):
        save(random_model(small_config()), tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]
