"""Models over the devices of a mesh: where their parts lie, what they compute, and checkpoints on other meshes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec
from sharding_site import MODELS

from kda_jax.config import ModelConfig
from kda_jax.engine import Shared
from kda_jax.model import Model
from kda_jax.sharding import partition, partition_state, shard, shard_state
from kda_jax.state import empty
from kda_jax.weights.skeleton import assemble
from transfer import MemoryObjects

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "tests" / "sharding_site.py"


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What eight devices in another process saw."""
    flags = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
    path = os.pathsep.join([str(ROOT), str(SITE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    environment["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    command = [sys.executable, "-W", "error", str(SITE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def abstract(config: ModelConfig) -> Model:
    """A model of shapes alone."""
    return assemble(config, jnp.bfloat16, lambda path, shape: cast(jax.Array, shape))


def shapes(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """Of its parameters, with their shardings, by path."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): param.get_value() for path, param in flat}


def mesh(tensor: int, expert: int) -> AbstractMesh:
    """A mesh of no devices."""
    return AbstractMesh((tensor, expert), ("tensor", "expert"))


RUNS = [("linear", "4x2"), *(("k3", name) for name in ("1x1", "1x2", "2x2", "8x1", "2x4"))]


@pytest.mark.parametrize(("model", "name"), RUNS)
def test_a_mesh_gives_the_logits_and_states_of_one_device(
    seen: dict[str, Any], model: str, name: str
) -> None:
    run = seen[model][name]
    assert run["logits"] < 1e-5 and run["states"] < 1e-5


@pytest.mark.parametrize(("model", "name"), RUNS)
def test_no_weight_is_sent(seen: dict[str, Any], model: str, name: str) -> None:
    run = seen[model][name]
    gathered = [shape for operation, _, shape in run["moved"] if operation == "all-gather"]
    assert [shape for shape in gathered if shape in run["weights"]] == []
    assert [dtype for _, dtype, _ in run["moved"] if dtype == "u8"] == []  # of packed experts not a part
    assert bool(gathered) != name.startswith("1x")  # activations are gathered, so the search does find


def test_a_token_over_eight_devices_has_the_logits_of_one(seen: dict[str, Any]) -> None:
    assert seen["stepped"]["logits"] < 1e-5


def test_a_token_sends_neither_weights_nor_states(seen: dict[str, Any]) -> None:
    sent = [shape for operation, _, shape in seen["stepped"]["moved"] if operation == "all-gather"]
    assert sent and [shape for shape in sent if shape in seen["stepped"]["held"]] == []


@pytest.mark.parametrize(("model", "name"), [run for run in RUNS if not run[1].startswith("1x")])
def test_states_come_back_with_their_heads(seen: dict[str, Any], model: str, name: str) -> None:
    heads, channels = 8 // int(name[0]), 192 // int(name[0])
    end, at = seen[model][name]["kept"]
    assert end == [[2, heads, 8, 8], [2, 3, channels], [2]]
    assert at == [[2, 1, heads, 8, 8], [2, 1, 3, channels], [2, 1]]


@pytest.mark.parametrize("name", ["8x1", "1x1", "4x2"])
def test_a_checkpoint_of_2x4_is_restored_to_the_bit(seen: dict[str, Any], name: str) -> None:
    assert seen["checkpoint"]["stored"] == [37]
    restored = seen["checkpoint"]["restored"][name]
    assert restored["same"]
    assert restored["kept"] == [[1, 8 // int(name[0]), 8, 8], [1, 3, 192 // int(name[0])], [1]]


@pytest.mark.parametrize("name", ["8x1", "1x1", "4x2"])
def test_each_place_reads_its_own_bytes_and_no_others(seen: dict[str, Any], name: str) -> None:
    # a head of the one layer: 3 rows of 3 x 8 channels, 288 bytes, up to the next multiple of 64; a state of 8 x 8
    places, head = int(name[0]), 320 + 256
    (whole,), *own = seen["checkpoint"]["restored"][name]["reads"]
    assert own == [[[i * 8 * head // places, (i + 1) * 8 * head // places]] for i in range(places)]
    assert whole[0] == 8 * head


def test_a_place_that_fails_makes_the_hit_a_miss_for_all(seen: dict[str, Any]) -> None:
    assert seen["checkpoint"]["failed"] == [0] * 5


def test_a_piece_that_two_places_share_is_read_by_both(seen: dict[str, Any]) -> None:
    assert seen["crossing"] == [True, True]


@pytest.mark.parametrize(
    "config", [ModelConfig.kimi_linear_48b(), ModelConfig.kimi_k3()], ids=["linear", "k3"]
)
def test_a_device_of_64_holds_a_part_of_whatever_is_large(config: ModelConfig) -> None:
    config = dataclasses.replace(config, layers=config.layers[:4], mlps=config.mlps[:4])
    for path, leaf in shapes(shard(abstract(config), mesh(8, 8))).items():
        part, of_experts = math.prod(leaf.sharding.shard_shape(leaf.shape)), ".mlp.w_" in path
        assert part == leaf.size // (64 if of_experts else 8) or leaf.size <= 7168 * 896, path


PARTS = {
    "embed": (72, 8),
    "lm_head.kernel": (32, 18),
    "layers.0.attn.conv": (4, 48),
    "layers.0.attn.A_log": (2,),
    "layers.0.attn.dt_bias": (2, 8),
    "layers.0.attn.f_b.kernel": (8, 16),
    "layers.0.attn.o_norm": (8,),
    "layers.0.attn.o_proj.kernel": (16, 32),
    "layers.0.mlp.gate_up.kernel": (32, 24),
    "layers.0.mlp.down.kernel": (12, 32),
    "layers.1.attn.kv_norm": (16,),
    "layers.1.attn.w_uk": (2, 8, 16),
    "layers.1.attn.w_uv": (2, 16, 8),
    "layers.1.attn.o_proj.kernel": (16, 32),
    "layers.1.mlp.router.kernel": (32, 8),
    "layers.1.mlp.shared.down.kernel": (8, 32),
}
OF_LINEAR = {"layers.0.attn.g_b.kernel": (8, 16), "layers.1.mlp.w_gate_up": (1, 32, 64)}
OF_K3 = {
    "layers.1.attn.q_b.kernel": (24, 32),
    "layers.1.mlp.latent_down.kernel": (32, 8),
    "layers.1.mlp.latent_up.kernel": (8, 32),
    "layers.1.mlp.w_gate_up.packed": (1, 64, 16),
    "layers.1.mlp.w_down.scale": (1, 32, 1),
}


@pytest.mark.parametrize(("name", "parts"), [("linear", PARTS | OF_LINEAR), ("k3", PARTS | OF_K3)])
def test_heads_and_experts_are_where_the_mesh_says(name: str, parts: dict[str, tuple[int, ...]]) -> None:
    params = shapes(shard(abstract(MODELS[name]), mesh(4, 2)))
    assert {path: params[path].sharding.shard_shape(params[path].shape) for path in parts} == parts


def test_specs_have_the_trees_of_what_they_place() -> None:
    model, config = abstract(MODELS["k3"]), MODELS["k3"]
    state = jax.eval_shape(lambda: empty(config, 3, 8))
    assert jax.tree.structure(partition(model)) == jax.tree.structure(nnx.state(model))
    assert partition_state(state).layers[0].recurrent == PartitionSpec(None, "tensor", None, None)
    assert shard_state(state, mesh(4, 2)).layers[0].conv.sharding.shard_shape((3, 3, 192)) == (3, 3, 48)


@pytest.mark.parametrize(
    ("changes", "tensor", "expert", "message"),
    [
        ({"kda_num_heads": 3}, 2, 1, "kda_num_heads=3 is not a multiple of the mesh's tensor=2"),
        ({"num_heads": 9}, 2, 1, "num_heads=9 is not a multiple of the mesh's tensor=2"),
        ({"num_experts": 6}, 2, 2, "num_experts=6 is not a multiple of the mesh's 4 devices"),
        ({"vocab_size": 73}, 8, 1, r"lm_head.kernel \(32, 73\): axis 1 does not divide over 8 devices"),
    ],
    ids=["kda heads", "mla heads", "experts", "vocabulary"],
)
def test_what_does_not_divide_is_refused(
    changes: dict[str, int], tensor: int, expert: int, message: str
) -> None:
    config = dataclasses.replace(MODELS["linear"], kda_num_v_heads=None, **changes)
    with pytest.raises(ValueError, match=message):
        shard(abstract(config), mesh(tensor, expert))


def test_a_mesh_without_one_of_the_axes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks \['expert'\]; make it with jax.make_mesh"):
        shard(abstract(MODELS["linear"]), AbstractMesh((2,), ("tensor",)))


def test_a_parameter_without_a_place_is_named() -> None:
    model = abstract(MODELS["linear"])
    model.extra = nnx.Param(jax.ShapeDtypeStruct((8,), jnp.float32))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="extra is no parameter of a model that can be sharded"):
        partition(model)


def test_an_unsharded_model_has_no_pieces_to_share() -> None:
    with MemoryObjects() as objects, pytest.raises(ValueError, match="the model is on no mesh"):
        Shared(objects, bytes(32), model=abstract(MODELS["linear"]))
