"""K3's checkpoints: experts that stay packed or do not, float32 beside bfloat16, and what is the vision tower's."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kda_jax.commands import run
from kda_jax.forward import prefill
from kda_jax.layers import KimiDeltaAttention
from kda_jax.model import Model
from kda_jax.weights import WeightsError, load, load_orbax, save, save_orbax
from kda_jax.weights.files import TensorFiles
from kda_jax.weights.packed import unpacked
from kda_jax.weights.skeleton import parameters
from measure import assert_close
from pallas_kernels import Mxfp4, unpack_mxfp4
from random_model import K3, random_model, small_config

Tensors = dict[str, np.ndarray]
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2."
VISION = {"vision_tower.blocks.0.x": np.full(3, np.nan, np.float32), "mm_projector.y": np.zeros(2, np.int64)}


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(small_config(**K3), dtype=jnp.bfloat16)


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    save(model, tmp_path / "model", max_shard_nbytes=30_000)
    return tmp_path / "model"


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Changes the tensors of all shards; new ones go into a shard of their own."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held: Tensors = {}
    for file in set(index["weight_map"].values()):
        held |= load_file(folder / file)
    change(held)
    for name in held:
        index["weight_map"].setdefault(name, "model-more.safetensors")
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name in held}
    for file in set(index["weight_map"].values()):
        mine = {name: held[name] for name, where in index["weight_map"].items() if where == file}
        save_file(mine, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_same(want: dict[str, Any], got: dict[str, Any]) -> None:
    assert {path: value.dtype for path, value in want.items()} == {
        path: value.dtype for path, value in got.items()
    }
    assert not [path for path in want if not np.array_equal(np.asarray(want[path]), np.asarray(got[path]))]


def test_experts_stay_packed_and_come_back_as_they_were(model: Model, folder: Path) -> None:
    loaded = load(folder)
    assert loaded.config == model.config
    assert_same(parameters(model), parameters(loaded))
    held = parameters(loaded)
    assert (held["layers.1.mlp.w_gate_up.packed"].dtype, held["layers.1.mlp.w_gate_up.packed"].shape) == (
        jnp.uint8,
        (4, 64, 16),
    )
    stored = load_file(
        next(file for file in folder.glob("*.safetensors") if _holds(file, EXPERT + "w3.weight_scale"))
    )
    np.testing.assert_array_equal(
        held["layers.1.mlp.w_gate_up.scale"][2, 32:], stored[EXPERT + "w3.weight_scale"]
    )


def _holds(file: Path, name: str) -> bool:
    return name in load_file(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_unpacked_on_request_without_loss(model: Model, folder: Path, dtype: str) -> None:
    loaded = load(folder, dtype=dtype, unpack=True)
    assert loaded.config.quantization is None
    held, packed = parameters(loaded), parameters(model)
    for name in ("w_gate_up", "w_down"):
        path = f"layers.1.mlp.{name}"
        want = unpack_mxfp4(Mxfp4(packed[f"{path}.packed"], packed[f"{path}.scale"]))
        assert held[path].dtype == dtype
        np.testing.assert_array_equal(np.asarray(held[path]).astype(np.float32), np.swapaxes(want, 1, 2))
    save(loaded, folder.parent / "plain")
    again = load(folder.parent / "plain")
    assert again.config == loaded.config
    assert_same(held, parameters(again))


def test_packed_experts_compute_what_their_numbers_do(folder: Path) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 70, 24)), jnp.float32)
    packed, plain = (load(folder, dtype="float32", unpack=unpack).layers[1].mlp for unpack in (False, True))
    assert_close("y", jax.jit(lambda x: plain(x))(x), jax.jit(lambda x: packed(x))(x), 2e-6)


def test_numpy_unpacks_as_jax_does() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (40, 64), dtype=np.uint8)
    scale = rng.integers(4, 250, (40, 4), dtype=np.uint8)
    np.testing.assert_array_equal(
        unpacked(packed, scale), unpack_mxfp4(Mxfp4(jnp.asarray(packed), jnp.asarray(scale)))
    )


def test_the_files_say_whether_experts_are_packed(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert load(folder).config.quantization == "mxfp4"


def _in_float32(tensors: Tensors) -> None:
    """As K3's release: convolutions and the norm of KDA's heads in float32, with values that bfloat16 lacks."""
    for name, value in tensors.items():
        if "conv1d" in name or "o_norm" in name:
            tensors[name] = value.astype(np.float32) * np.float32(1 + 2**-12)


def test_what_is_stored_in_float32_beside_bfloat16_stays_so(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, _in_float32)
    loaded = load(folder)
    held = parameters(loaded)
    for path in ("layers.1.attn.conv", "layers.1.attn.o_norm"):
        assert held[path].dtype == jnp.float32
        assert (held[path] != held[path].astype(jnp.bfloat16).astype(jnp.float32)).any()
    assert held["layers.1.attn.in_proj.kernel"].dtype == held["norm"].dtype == jnp.bfloat16
    kda = loaded.layers[1].attn
    assert isinstance(kda, KimiDeltaAttention)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 24)), jnp.bfloat16)
    whole, _ = jax.jit(lambda x: kda(x))(x)
    _, state = jax.jit(lambda x: kda(x))(x[:, :4])
    last, state = jax.jit(lambda x, state: kda(x, state))(x[:, 4:], state)
    assert whole.dtype == last.dtype == state.conv.dtype == jnp.bfloat16
    assert_close("the step after", whole[:, 4:], last, 1e-2)
    save(loaded, tmp_path / "again")
    assert_same(held, parameters(load(tmp_path / "again")))
    save_orbax(loaded, tmp_path / "orbax")
    assert_same(held, parameters(load_orbax(tmp_path / "orbax")))
    assert_same(parameters(load(folder, dtype="float32")), {p: _wide(v) for p, v in held.items()})


def _wide(value: Any) -> np.ndarray:
    return np.asarray(value if value.dtype == jnp.uint8 else value.astype(jnp.float32))


@pytest.mark.parametrize("unpack", [False, True], ids=["packed", "unpacked"])
def test_every_tensor_is_read_once_and_vision_not_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unpack: bool
) -> None:
    rewrite(folder, lambda tensors: tensors.update(VISION))
    with TensorFiles(folder) as files:
        sizes = {name: math.prod(shape) for name, shape in files.shapes.items()}
    assert sizes.keys() > VISION.keys()
    read: Counter[str] = Counter()
    real = TensorFiles.read

    def watched(files: TensorFiles, name: str, rows: slice, columns: slice, into: np.ndarray) -> None:
        read[name] += into.size
        real(files, name, rows, columns, into)

    monkeypatch.setattr(TensorFiles, "read", watched)
    load(folder, unpack=unpack)
    twice = {f"language_model.model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (0, 2)}
    assert read == {
        name: size * (2 if name in twice else 1) for name, size in sizes.items() if name not in VISION
    }


def _no_number(tensors: Tensors) -> None:
    tensors[EXPERT + "w2.weight_scale"][3, 0] = 255


@pytest.mark.parametrize(
    ("unpack", "name"), [(False, "w2.weight_scale"), (True, "w2.weight")], ids=["packed", "unpacked"]
)
def test_a_scale_that_is_no_number_is_named(folder: Path, unpack: bool, name: str) -> None:
    rewrite(folder, _no_number)
    with pytest.raises(WeightsError, match="NaN or infinity in") as caught:
        load(folder, unpack=unpack)
    assert caught.value.nonfinite == (EXPERT + name,)


def _lost_scale(tensors: Tensors) -> None:
    del tensors[EXPERT + "w1.weight_scale"]


def _short_scale(tensors: Tensors) -> None:
    tensors[EXPERT + "w1.weight_scale"] = np.zeros((32, 2), np.uint8)


def _signed(tensors: Tensors) -> None:
    tensors[EXPERT + "w1.weight_packed"] = tensors[EXPERT + "w1.weight_packed"].view(np.int8)


def _no_up_projection(tensors: Tensors) -> None:
    del tensors["language_model.model.layers.1.block_sparse_moe.routed_expert_up_proj.weight"]


@pytest.mark.parametrize("unpack", [False, True], ids=["packed", "unpacked"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_lost_scale, r"missing \(1\): .*experts.2.w1.weight"),
        (_short_scale, r"experts.2.w1.weight"),
        (_signed, r"experts.2.w1.weight"),
        (_no_up_projection, r"missing \(1\): .*routed_expert_up_proj"),
    ],
    ids=["lost-scale", "short-scale", "signed", "no-up-projection"],
)
def test_what_does_not_fit_is_named(
    folder: Path, spoil: Callable[[Tensors], Any], words: str, unpack: bool
) -> None:
    rewrite(folder, spoil)
    with pytest.raises(WeightsError, match=words):
        load(folder, unpack=unpack)


def test_a_model_of_unpacked_experts_gives_the_logits_of_the_packed_one(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 67, (1, 40), np.int32)
    packed, plain = (load(folder, dtype="float32", unpack=unpack) for unpack in (False, True))
    assert plain.config.quantization is None
    assert_close("logits", prefill(plain, tokens)[0], prefill(packed, tokens)[0], 2e-6)


def test_convert_writes_experts_out_on_request(
    model: Model, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(folder), str(tmp_path / "plain"), "--to", "hf", "--unpack"]) == 0
    want, got = parameters(load(folder, unpack=True)), parameters(load(tmp_path / "plain"))
    assert_same(want, got)
    assert run(["convert", str(folder), str(tmp_path / "packed"), "--to", "hf"]) == 0
    assert_same(parameters(model), parameters(load(tmp_path / "packed")))
    save_orbax(model, tmp_path / "orbax")
    capsys.readouterr()
    assert run(["convert", str(tmp_path / "orbax"), str(tmp_path / "no"), "--unpack"]) == 1
    assert "--unpack takes one in Hugging Face's layout" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
