"""Saved states, and models and states as Orbax checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kda_jax.config import ModelConfig
from kda_jax.forward import decode
from kda_jax.model import Model
from kda_jax.state import MLAState, ModelState, grow
from kda_jax.weights import (
    WeightsError,
    load,
    load_orbax,
    load_state,
    load_state_orbax,
    save,
    save_orbax,
    save_state,
    save_state_orbax,
)
from kda_jax.weights.skeleton import parameters
from random_model import random_model, small_config

POSITION = (7, 3)
CAPACITY = 16


def random_state(config: ModelConfig, dtype: type = jnp.float32, dead: float = np.nan) -> ModelState:
    """A state of two rows of different lengths; what lies behind a row's position is `dead`."""
    from kda_jax.state import empty

    rng = np.random.default_rng(5)
    position = jnp.asarray(POSITION, jnp.int32)

    def draw(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    def fill(layer):
        if not isinstance(layer, MLAState):
            return layer._replace(recurrent=draw(layer.recurrent), conv=draw(layer.conv), position=position)
        alive = np.arange(CAPACITY) < np.asarray(position)[:, None]
        return layer._replace(latent=jnp.where(alive[..., None], draw(layer.latent), dead), position=position)

    return ModelState(tuple(fill(layer) for layer in empty(config, 2, CAPACITY, dtype).layers))


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(small_config())


def alive(state: ModelState) -> ModelState:
    """The state with its dead rows cut or zeroed, as numpy."""

    def layer(old):
        if not isinstance(old, MLAState):
            return old
        live = jnp.arange(7) < old.position[:, None]
        return old._replace(latent=jnp.where(live[..., None], old.latent[:, :7], 0))

    return jax.tree.map(np.asarray, ModelState(tuple(layer(old) for old in state.layers)))


def assert_same(want: ModelState, got: ModelState) -> None:
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(alive(want)), jax.tree.leaves(alive(got)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


SAVED = {
    "file": (lambda path, state, *of: save_state(path, state, *of), load_state),
    "orbax": (lambda path, state, *of: save_state_orbax(state, path, *of), load_state_orbax),
}
saved = pytest.mark.parametrize(("write", "read"), SAVED.values(), ids=SAVED.keys())


@saved
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_state_comes_back_to_the_bit(
    write: Callable, read: Callable, dtype: type, model: Model, tmp_path: Path
) -> None:
    state = random_state(model.config, dtype)
    write(tmp_path / "state", state, model)
    for of in ((), (model,), (model.config,)):
        back = read(tmp_path / "state", *of)
        assert_same(state, back)
        assert back.capacity == 7


def test_decoding_goes_on_as_if_never_stopped(model: Model, tmp_path: Path) -> None:
    state = random_state(model.config, dead=0.0)
    save_state(tmp_path / "state", state, model)
    loaded = grow(load_state(tmp_path / "state", model), CAPACITY)
    want, got = (decode(model, [1, 2], start) for start in (state, loaded))
    np.testing.assert_array_equal(want[0], got[0])
    assert_same(want[1], got[1])


def test_file_holds_live_rows_under_leaf_names(model: Model, tmp_path: Path) -> None:
    save_state(tmp_path / "a", random_state(model.config), model)
    save_state(tmp_path / "b", grow(random_state(model.config, dead=1e30), 40), model)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    held = load_file(tmp_path / "a")
    assert {name: value.shape for name, value in held.items()} == {
        "layers.0.recurrent": (2, 2, 8, 8),
        "layers.0.conv": (2, 3, 48),
        "layers.0.position": (2,),
        "layers.1.latent": (2, 7, 16),
        "layers.1.position": (2,),
    }
    with safe_open(tmp_path / "a", "np") as file:
        about = json.loads(file.metadata()["kda-jax"])
    assert (about["format"], about["version"], about["position"]) == ("kda-jax state", 1, list(POSITION))
    assert len(about["config"]) == 64


@saved
def test_empty_state_comes_back(write: Callable, read: Callable, model: Model, tmp_path: Path) -> None:
    from kda_jax.state import empty

    write(tmp_path / "state", empty(model.config, 1, 4))
    assert read(tmp_path / "state", model).position.tolist() == [0]


@saved
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"routed_scaling_factor": 2.0}, "another model"),
        ({"kda_v_head_dim": 5}, "another model"),
    ],
    ids=["arithmetic", "shapes"],
)
def test_state_of_another_model_is_refused(
    write: Callable, read: Callable, changes: dict, words: str, model: Model, tmp_path: Path
) -> None:
    write(tmp_path / "state", random_state(model.config), model)
    with pytest.raises(WeightsError, match=words):
        read(tmp_path / "state", small_config(**changes))
    read(tmp_path / "state", dataclasses.replace(model.config, eos_token_id=5))


@saved
@pytest.mark.parametrize(
    ("changes", "misshaped"),
    [
        (
            {"kda_v_head_dim": 5},
            (
                "layers.0.recurrent: shape [2, 2, 8, 8], expected [2, 2, 8, 5]",
                "layers.0.conv: shape [2, 3, 48], expected [2, 3, 42]",
            ),
        ),
        ({"qk_rope_head_dim": 6}, ("layers.1.latent: shape [2, 7, 16], expected [2, 7, 18]",)),
        (
            {"layers": ("mla", "kda")},
            ("layers.0: KDAState, expected MLAState", "layers.1: MLAState, expected KDAState"),
        ),
    ],
    ids=["kda", "mla", "pattern"],
)
def test_without_a_digest_shapes_tell(
    write: Callable, read: Callable, changes: dict, misshaped: tuple, model: Model, tmp_path: Path
) -> None:
    write(tmp_path / "state", random_state(model.config))
    with pytest.raises(WeightsError, match="another model") as caught:
        read(tmp_path / "state", small_config(**changes))
    assert caught.value.misshaped == misshaped


@saved
def test_other_number_of_layers_is_refused(
    write: Callable, read: Callable, model: Model, tmp_path: Path
) -> None:
    write(tmp_path / "state", random_state(model.config))
    with pytest.raises(WeightsError, match="2 layers; the model has 3"):
        read(tmp_path / "state", small_config(layers=("kda",) * 3, mlps=("dense",) * 3))


def _resave(change: Callable[[dict, dict], None]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        held = load_file(path)
        with safe_open(path, "np") as file:
            about = json.loads(file.metadata()["kda-jax"])
        change(held, about)
        save_file(held, path, metadata={"kda-jax": json.dumps(about)})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "no whole safetensors file"),
        (_resave(lambda held, about: about.update(version=2)), "has version 2"),
        (_resave(lambda held, about: about.pop("format")), "holds no state"),
        (_resave(lambda held, about: held.pop("layers.0.conv")), r"missing \(1\): layers.0.conv"),
        (_resave(lambda held, about: held.update(extra=np.zeros(1))), r"surplus \(1\): extra"),
        (_resave(lambda held, about: held.clear()), "no whole state"),
    ],
    ids=["absent", "cut", "version", "format", "missing leaf", "surplus leaf", "empty"],
)
def test_a_broken_state_file_is_one_clear_error(
    spoil: Callable[[Path], None], words: str, model: Model, tmp_path: Path
) -> None:
    save_state(tmp_path / "state", random_state(model.config))
    spoil(tmp_path / "state")
    with pytest.raises(WeightsError, match=words):
        load_state(tmp_path / "state")


def test_failing_save_keeps_the_old_state(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path / "state", random_state(model.config))
    before = (tmp_path / "state").read_bytes()

    def fail(arrays: dict, path: Path, **kwargs: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("kda_jax.weights.statefile.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_state(tmp_path / "state", random_state(model.config, dead=0.0))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_between_layouts_nothing_is_lost(dtype: str, tmp_path: Path) -> None:
    config = small_config(q_lora_rank=9, kda_num_v_heads=4, eos_token_id=(3, 4))
    model = random_model(config, dtype=dtype)
    save(model, tmp_path / "hf")
    save_orbax(load(tmp_path / "hf"), tmp_path / "orbax")
    save(load_orbax(tmp_path / "orbax"), tmp_path / "back")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "back" / file).read_bytes()
    assert load_orbax(tmp_path / "orbax").config == config


def test_orbax_converts_on_the_way(model: Model, tmp_path: Path) -> None:
    save_orbax(model, tmp_path / "orbax")
    narrow = parameters(load_orbax(tmp_path / "orbax", dtype=jnp.bfloat16))
    for path, value in parameters(model).items():
        small = path.endswith(("A_log", "dt_bias", "router.kernel", "router.bias"))
        np.testing.assert_array_equal(value if small else value.astype(jnp.bfloat16), narrow[path])


def test_orbax_overwrites_nothing(model: Model, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ValueError, match="not an empty folder"):
        save_orbax(model, tmp_path)


def test_orbax_misfits_are_named_in_one_error(model: Model, tmp_path: Path) -> None:
    save_orbax(model, tmp_path / "orbax")
    (file,) = (tmp_path / "orbax" / "config").glob("metadata")
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "vocab_size": 66, "num_shared_experts": 0}))
    with pytest.raises(WeightsError) as caught:
        load_orbax(tmp_path / "orbax")
    shared = "layers.1.mlp.shared."
    assert caught.value.surplus == (shared + "down.kernel", shared + "gate_up.kernel")
    assert caught.value.misshaped == (
        "embed: shape [67, 24], expected [66, 24]",
        "lm_head.kernel: shape [24, 67], expected [24, 66]",
    )


def test_what_is_no_orbax_checkpoint_is_one_clear_error(model: Model, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no Orbax checkpoint"):
        load_orbax(tmp_path / "absent")
    save_state_orbax(random_state(model.config), tmp_path / "state")
    with pytest.raises(WeightsError, match="'config'"):
        load_orbax(tmp_path / "state")
    with pytest.raises(WeightsError, match="no Orbax checkpoint"):
        load_state_orbax(tmp_path)
