"""What is wrong with a checkpoint is said once, by name, and nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kda_jax.weights import WeightsError, load, save
from random_model import random_model, small_config

Tensors = dict[str, np.ndarray]
LAYER = "model.layers.0.self_attn."


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "model"
    save(random_model(small_config()), folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in written.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def _rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")


def test_all_misfits_are_named_in_one_error(folder: Path) -> None:
    def change(held: Tensors) -> None:
        del held["lm_head.weight"], held[LAYER + "dt_bias"]
        held["model.layers.2.input_layernorm.weight"] = np.zeros(24, np.float32)
        held["model.layers.0.block_sparse_moe.up_proj.weight"] = held[
            "model.layers.0.mlp.up_proj.weight"
        ].copy()
        held["model.norm.weight"] = np.zeros(25, np.float32)
        held[LAYER + "A_log"] = np.zeros((1, 1, 1, 2), np.float32)

    _rewrite(folder, change)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    error = caught.value
    assert error.missing == ("lm_head.weight", LAYER + "dt_bias")
    assert len(error.surplus) == 2
    assert set(error.surplus) & {"model.layers.2.input_layernorm.weight"}
    assert any("the same as" in name for name in error.surplus)
    assert error.misshaped == (
        "model.norm.weight: shape [25], expected [24]",
        LAYER + "A_log: shape [1, 1, 1, 2], expected [1, 1, 2, 1]",
    )
    for name in (*error.missing, *error.surplus, *error.misshaped):
        assert name in str(error)


def test_long_lists_are_cut_in_the_text_and_whole_in_the_error(folder: Path) -> None:
    _rewrite(folder, lambda held: [held.pop(name) for name in sorted(held) if "experts" in name])
    with pytest.raises(WeightsError, match=r"missing \(15\): .*, and 7 more") as caught:
        load(folder)
    assert len(caught.value.missing) == 15


def test_half_a_fused_set_is_an_error(folder: Path) -> None:
    def change(held: Tensors) -> None:
        held[LAYER + "conv1d.weight"] = np.concatenate([held[f"{LAYER}{x}_conv1d.weight"] for x in "qkv"])
        del held[LAYER + "q_conv1d.weight"]

    _rewrite(folder, change)
    with pytest.raises(WeightsError) as caught:
        load(folder)
    assert caught.value.surplus == (LAYER + "k_conv1d.weight", LAYER + "v_conv1d.weight")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_values_that_are_no_numbers_are_named(value: float, dtype: type, folder: Path) -> None:
    names = ["model.layers.1.block_sparse_moe.experts.2.w3.weight", LAYER + "k_proj.weight", LAYER + "A_log"]

    def change(held: Tensors) -> None:
        for name in names:
            held[name].reshape(-1)[-1] = value

    _rewrite(folder, change)
    with pytest.raises(WeightsError, match="NaN or infinity in") as caught:
        load(folder, dtype=dtype)
    assert sorted(caught.value.nonfinite) == sorted(names)


def test_overflow_on_the_way_is_named(folder: Path) -> None:
    def change(held: Tensors) -> None:
        held["model.embed_tokens.weight"][3, 4] = 1e5

    _rewrite(folder, change)
    load(folder, dtype=jnp.bfloat16)
    with pytest.raises(WeightsError, match="as float16") as caught:
        load(folder, dtype=jnp.float16)
    assert caught.value.nonfinite == ("model.embed_tokens.weight",)


def test_padding_of_a_log_must_be_zeros(folder: Path) -> None:
    _rewrite(folder, lambda held: held.update({LAYER + "A_log": np.ones(128, np.float32)}))
    with pytest.raises(WeightsError, match=r"A_log.*not zeros"):
        load(folder)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _cut_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])


def _other_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def _lacking_config(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    del fields["hidden_size"]
    (folder / "config.json").write_text(json.dumps(fields))


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _torch_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _index(weight_map: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def _integers(folder: Path) -> None:
    _rewrite(folder, lambda held: held.update({"model.norm.weight": np.zeros(24, np.int8)}))


def _removed(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, r"model.safetensors \(\d+ bytes\) is no whole safetensors file"),
        (_cut_header, r"model.safetensors \(20 bytes\) is no whole safetensors file"),
        (_other_model, "model_type 'llama'"),
        (_no_config, "config.json does not exist"),
        (_broken_config, "no readable json"),
        (_lacking_config, "config lacks hidden_size"),
        (_no_weights, "neither model.safetensors nor model.safetensors.index.json"),
        (_torch_weights, "pytorch_model.bin, which is not read"),
        (_index({"a": "model-1.safetensors"}), "files that are not there: model-1.safetensors"),
        (_index({"a": "model.safetensors"}), r"its files lack; missing \(1\): a"),
        (_index([]), "has no weight_map"),
        (_index({"a": 1}), "has no weight_map"),
        (_integers, "model.norm.weight is stored as I8"),
        (_removed, "does not exist; give the folder"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_what_cannot_be_read_is_one_clear_error(
    spoil: Callable[[Path], None], words: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(WeightsError, match=words) as caught:
        load(folder)
    assert str(folder) in str(caught.value) or "stored as" in words
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(WeightsError, match="is a file; give the folder"):
        load(folder / "config.json")


def test_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype=int8"):
        load(folder, dtype=jnp.int8)
