"""Parts of parameters: what is read of the files is what the part holds, and loading keeps to its memory."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from rich.progress import Progress, TaskID
from safetensors.numpy import load_file, save_file

from benchmarks.importing import largest_tensor
from benchmarks.synthetic_checkpoint import write
from kda_jax.config import ModelConfig
from kda_jax.weights import WeightsError, files, load, parts, save
from kda_jax.weights.files import TensorFiles
from kda_jax.weights.load import match
from kda_jax.weights.packed import UnpackedFiles
from kda_jax.weights.parts import Parts, Source, whole_box
from kda_jax.weights.skeleton import parameters
from random_model import K3, random_model, small_config

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "k3": K3,
    "k3, plain experts": K3 | {"quantization": None},
    "grouped values": {"kda_num_v_heads": 4, "kda_v_head_dim": 5},
    "tied": {"tie_embeddings": True},
}


def num_read(sources: list[Source], config: ModelConfig, whole: jax.Array, box: tuple[slice, ...]) -> int:
    """Values of the files that a part of a parameter needs: whole rows where a tensor cannot be cut across."""
    sizes = [cut.stop - cut.start for cut in box]
    match sources[0].tensor.transform:
        case "conv":
            return sizes[1] * config.conv_size
        case "key_and_value_heads":
            return sizes[0] * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
        case "heads":
            return max(math.prod(source.tensor.shape) for source in sources)
        case "head_channels":
            return whole.size
    return math.prod(sizes) * (2 if sources[-1].name == "lm_head.weight" and len(sources) == 2 else 1)


class Watch:
    """Counts the values that are read of each tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        read = TensorFiles.read

        def watched(held: TensorFiles, name: str, rows: slice, columns: slice, into: np.ndarray) -> None:
            self.count[name] += into.size
            read(held, name, rows, columns, into)

        monkeypatch.setattr(files.TensorFiles, "read", watched)


def random_box(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """A part with something in it."""
    ends = (np.sort(rng.choice(size + 1, 2, replace=False)) for size in shape)
    return tuple(slice(int(start), int(stop)) for start, stop in ends)


@pytest.mark.parametrize("block", [64, 1 << 20], ids=["small blocks", "one block"])
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_a_part_is_a_slice_of_the_whole_and_no_more_is_read(
    changes: dict[str, Any], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BLOCK_NBYTES", block)
    config = small_config(**changes)
    model = random_model(config)
    save(model, tmp_path / "model", max_shard_nbytes=30_000)
    watch, rng = Watch(monkeypatch), np.random.default_rng(0)
    with TensorFiles(tmp_path / "model") as held:
        plan = match(config, held.shapes)
        reader = Parts(held, config, lambda count: None)
        for path, whole in parameters(model).items():
            shape = jax.ShapeDtypeStruct(whole.shape, whole.dtype)
            for box in (whole_box(whole.shape), *(random_box(rng, whole.shape) for _ in range(4))):
                watch.count.clear()
                got = reader.read(plan[path], shape, box)
                np.testing.assert_array_equal(got, np.asarray(whole)[box], err_msg=f"{path} {box}")
                assert watch.count.total() == num_read(plan[path], config, whole, box), (path, box)
    assert reader.nonfinite == []


@pytest.mark.parametrize("axis", [0, 2], ids=["experts", "outputs"])
def test_a_part_of_fused_experts_reads_their_rows(
    axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(small_config())
    save(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe.experts."
    for name, parts_of in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        mine = [
            np.concatenate([tensors.pop(f"{layer}{expert}.{part}.weight") for part in parts_of])
            for expert in range(4)
        ]
        tensors[layer + name] = np.stack(mine)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    watch, whole = Watch(monkeypatch), np.asarray(parameters(model)["layers.1.mlp.w_gate_up"])
    box = tuple(slice(1, 3) if i == axis else slice(0, size) for i, size in enumerate(whole.shape))
    with TensorFiles(tmp_path / "model") as held:
        plan = match(model.config, held.shapes)
        shape = jax.ShapeDtypeStruct(whole.shape, whole.dtype)
        got = Parts(held, model.config, lambda count: None).read(plan["layers.1.mlp.w_gate_up"], shape, box)
    np.testing.assert_array_equal(got, whole[box])
    assert watch.count.total() == (whole[1:3].size if axis == 0 else whole.size)


def test_a_part_of_packed_experts_is_unpacked_from_its_own_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(**K3 | {"moe_intermediate_size": 96})
    save(random_model(config), tmp_path / "model")
    whole = np.asarray(parameters(load(tmp_path / "model", unpack=True))["layers.1.mlp.w_down"])  # [E, I, Z]
    box = (slice(1, 2), slice(40, 70), slice(3, 7))
    watch = Watch(monkeypatch)
    with TensorFiles(tmp_path / "model") as held:
        unpacked = UnpackedFiles(held)
        plain = dataclasses.replace(config, quantization=None)
        plan = match(plain, unpacked.shapes)
        shape = jax.ShapeDtypeStruct(whole.shape, whole.dtype)
        got = Parts(unpacked, plain, lambda count: None).read(plan["layers.1.mlp.w_down"], shape, box)
    np.testing.assert_array_equal(got, whole[box])
    assert watch.count.total() == 4 * 64 / 2 + 4 * 64 / 32  # columns 32 to 96 of rows 3 to 7


def test_values_are_taken_over_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(random_model(small_config()), tmp_path / "model")
    read, addresses = Parts.read, set()

    def watched(*arguments: Any) -> np.ndarray:
        values = read(*arguments)
        addresses.add(values.ctypes.data)
        return values

    monkeypatch.setattr(Parts, "read", watched)
    held = parameters(load(tmp_path / "model"))
    assert {value.unsafe_buffer_pointer() for value in held.values()} == addresses


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(random_model(small_config()), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    real = TensorFiles.__init__

    def cut_behind(held: TensorFiles, directory: Path) -> None:
        real(held, directory)
        os.truncate(file, file.stat().st_size // 2)

    monkeypatch.setattr(TensorFiles, "__init__", cut_behind)
    with pytest.raises(WeightsError, match="shorter while it was read"):
        load(tmp_path / "model")


def test_files_are_closed_behind_a_load(tmp_path: Path) -> None:
    save(random_model(small_config()), tmp_path / "model", max_shard_nbytes=3_000)
    load(tmp_path / "model")
    names = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    assert not [name for name in names if name.startswith(str(tmp_path))]


def test_a_sharding_is_asked_for_every_parameter(tmp_path: Path) -> None:
    model = random_model(small_config(**K3), dtype=jnp.bfloat16)
    save(model, tmp_path / "model")
    asked: dict[str, jax.ShapeDtypeStruct] = {}
    here = SingleDeviceSharding(jax.devices()[0])

    def sharding_of(path: str, shape: jax.ShapeDtypeStruct) -> SingleDeviceSharding:
        asked[path] = shape
        return here

    got = parameters(load(tmp_path / "model", sharding_of=sharding_of))
    want = parameters(model)
    assert {path: (shape.shape, shape.dtype) for path, shape in asked.items()} == {
        path: (value.shape, value.dtype) for path, value in want.items()
    }
    assert not [path for path in want if not np.array_equal(np.asarray(want[path]), np.asarray(got[path]))]


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("unpack", [False, True], ids=["packed", "unpacked"])
def test_a_bar_counts_the_bytes_on_a_terminal(
    unpack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(random_model(small_config(**K3)), tmp_path / "model")
    done: list[tuple[float, float | None]] = []
    advance = Progress.advance

    def watched(bar: Progress, task: TaskID, count: float) -> None:
        advance(bar, task, count)
        done.append((bar.tasks[0].completed, bar.tasks[0].total))

    monkeypatch.setattr(Progress, "advance", watched)
    monkeypatch.setattr(sys, "stderr", Terminal())
    load(tmp_path / "model", unpack=unpack)
    assert "loading" in sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(done) > 60
    assert [count for count, _ in done] == sorted(count for count, _ in done)
    assert done[-1][0] == done[-1][1]


def test_no_bar_is_drawn_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(random_model(small_config()), tmp_path / "model")
    load(tmp_path / "model")
    assert capsys.readouterr() == ("", "")


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kda_jax.weights import load
from kda_jax.weights.files import TensorFiles
from kda_jax.weights.skeleton import parameters

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("experts", "heads"))
specs = {"packed": P("experts"), "scale": P("experts"), "kernel": P(None, "heads")}
whole = parameters(load(sys.argv[1]))
count, real = [0], TensorFiles.read
def read(self, name, rows, columns, into):
    count[0] += into.nbytes
    real(self, name, rows, columns, into)
TensorFiles.read = read
load(sys.argv[1])
once, count[0] = count[0], 0
spec = lambda path, shape: specs.get(path.split(".")[-1], P()) if all(
    size % 2 == 0 for size in shape.shape) else P()
parts = parameters(load(sys.argv[1], sharding_of=lambda *about: NamedSharding(mesh, spec(*about))))
for path, value in parts.items():
    assert len(value.sharding.device_set) == 4, path
    for shard in value.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(whole[path])[shard.index], err_msg=path)
cut = [path for path, value in parts.items() if value.addressable_shards[0].data.shape != value.shape]
print(len(cut), once, count[0])
"""


def test_what_several_devices_hold_is_read_once(tmp_path: Path) -> None:
    save(random_model(small_config(**K3)), tmp_path / "model")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "model")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    cut, once, sharded = map(int, result.stdout.split())
    assert cut > 10
    assert sharded == once


MEMORY = """
import json, sys
from pathlib import Path
import jax, numpy as np
from benchmarks.peak import reset_peak, resident_mib
from kda_jax.weights import load
from kda_jax.weights.files import TensorFiles
from kda_jax.weights.skeleton import parameters

folder, small = sys.argv[1:]
device_put, begin = jax.device_put, TensorFiles.__init__

def measured(dtype=None):
    assert reset_peak(), "/proc/self/clear_refs cannot be written"
    before = resident_mib()
    model = load(folder, dtype=dtype)
    kept = sum(value.nbytes for value in parameters(model).values())
    return kept, round((resident_mib("VmHWM") - before) * 2**20) - kept

def a_parameter_twice(values):
    return device_put(np.array(values))

def all_first(self, directory):
    begin(self, directory)
    self.held = [file.read_bytes() for file in Path(directory).glob("*.safetensors")]

load(small)
figures = {"packed": measured(), "in float32": measured("float32")}
jax.device_put = a_parameter_twice
figures["a parameter twice"] = measured()
jax.device_put, TensorFiles.__init__ = device_put, all_first
figures["all first"] = measured()
print(json.dumps(figures))
"""
BESIDE = 5 << 20
"""Bytes beside the parameters that a load may hold: its buffer of 1 MiB, the model's outline, the names and places of
some hundred tensors. Six measurements gave 4.07 to 4.14 million bytes for all of it and the tensor."""


def importing_config() -> ModelConfig:
    """Two sparse layers with most of the bytes in their experts; each expert is small beside the embedding."""
    sizes: dict[str, Any] = dict(hidden_size=256, vocab_size=4096, intermediate_size=512)
    experts: dict[str, Any] = dict(num_experts=32, routed_expert_hidden_size=512, moe_intermediate_size=512)
    return small_config(**K3 | sizes | experts | dict(layers=("kda", "mla"), mlps=("moe", "moe")))


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the kernel's high-water mark of memory"
)
def test_an_import_holds_what_it_keeps_and_a_tensor_at_most(tmp_path: Path) -> None:
    for name, config in (("large", importing_config()), ("small", small_config(**K3))):
        (tmp_path / name).mkdir()
        write(config, tmp_path / name, num_shards=4)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "large"), str(tmp_path / "small")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    figures, tensor = json.loads(result.stdout), largest_tensor(tmp_path / "large")
    kept = {name for name, (_, over) in figures.items() if over <= tensor + BESIDE}
    assert kept == {"packed", "in float32"}, f"{tensor=:,}, kept and peak over kept: {figures}"
