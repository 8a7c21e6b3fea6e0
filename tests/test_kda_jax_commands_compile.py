"""`compile`: the programs it hands to the compilers, what it makes of their answers, and how it fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from kda_jax.commands import placement, run
from kda_jax.commands.devices import MeshShape
from kda_jax.commands.programs import STATE, Calls, Program, closed_blocks, one_of_each, programs
from kda_jax.config import ModelConfig
from kda_jax.sharding import EXPERT, TENSOR
from kda_jax.weights.files import read_config
from pallas_kernels.check import command, gpu, tpu
from pallas_kernels.check.targets import TARGETS
from pallas_kernels.check.toolchain import Compiled, Missing, Toolchain, build, report

CALLS = Calls(tokens=64, rows=3, context=96)
AXES = (TENSOR, EXPERT)


@pytest.fixture
def folder(goldens: Path, tmp_path: Path) -> Path:
    """A config of K3's parts at small sizes: 6 layers in residual blocks of 2, 2 heads, 8 experts; of even sizes."""
    config = dataclasses.replace(read_config(goldens / "kimi_k3_tiny"), vocab_size=132, quantization="mxfp4")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_hf()))
    return tmp_path / "model"


@pytest.fixture
def tiny_k3(folder: Path) -> ModelConfig:
    """The same, read."""
    return read_config(folder)


def one_device() -> Mesh:
    return jax.make_mesh((1, 1), AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def test_one_of_each_kind_in_order() -> None:
    cut = one_of_each(ModelConfig.kimi_k3())
    assert (cut.layers, cut.mlps) == (("kda", "kda", "mla"), ("dense", "moe", "moe"))
    assert cut.hidden_size == 7168


def test_closed_blocks(tiny_k3: ModelConfig) -> None:
    assert closed_blocks(ModelConfig.kimi_k3()) == 8
    assert closed_blocks(tiny_k3) == 3 and closed_blocks(one_of_each(tiny_k3)) == 2
    assert closed_blocks(ModelConfig.tiny()) == 0


def test_programs_take_what_a_device_of_the_mesh_holds(tiny_k3: ModelConfig) -> None:
    shape = MeshShape(2, 2)
    held = placement.describe(tiny_k3, shape, None)
    for program, rows in zip(programs(tiny_k3, AbstractMesh(shape, AXES), CALLS), (1, 3)):
        assert program.parameter_bytes == held["parameter_bytes"]["total"], program.name
        position = rows * 4 * tiny_k3.num_layers
        latents = held["state_bytes"]["1024"]["latents"] * CALLS.context // 1024
        fixed = held["state_bytes"]["1024"]["state"] - held["state_bytes"]["1024"]["latents"]
        assert program.state_bytes == rows * (fixed + latents) + position, program.name
        tokens = (1, 64) if program.name == "prefill" else (3,)
        assert program.arguments[1].shape == tokens
        assert program.residual_bytes == 3 * jnp.zeros(tokens).size * tiny_k3.hidden_size * 2


def test_a_program_gives_logits_of_last_tokens_and_takes_the_states_place(tiny_k3: ModelConfig) -> None:
    mesh = one_device()
    for program, rows in zip(programs(tiny_k3, mesh, CALLS), (1, 3)):
        logits, state = jax.eval_shape(program.function, *program.arguments)
        assert logits.shape == ((1, 1) if program.name == "prefill" else (rows,)) + (tiny_k3.vocab_size,)
        old = program.arguments[STATE]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
            lambda x: (x.shape, x.dtype), old
        )
    decode = programs(one_of_each(tiny_k3), mesh, CALLS)[1]
    built, seconds = build(mesh, decode.function, decode.arguments, (STATE,))
    made = report(built, (), seconds)
    assert made.argument_bytes == used(decode, tiny_k3)
    assert made.reused_bytes == decode.state_bytes - COPIES


COPIES = 2 * 4 * CALLS.rows
"""Positions of the layers behind the first of three, which are its own: no program reads them."""


def used(decode: Program, config: ModelConfig) -> int:
    """Bytes of its arguments that one device has and reads: not the first layer's mix of no residual blocks."""
    mix = 2 * 2 * config.hidden_size
    return decode.parameter_bytes + decode.state_bytes + 4 * CALLS.rows - COPIES - mix


class Stand(Toolchain):
    """A toolchain that says what it is told to, and remembers what it was asked."""

    said: ClassVar[list[Compiled | Exception]]
    asked: ClassVar[list[tuple[Any, Any]]]

    def __init__(self, folder: Path) -> None:
        pass

    def mesh(self, target: Any, shape: Any, names: Any, topology: str | None = None) -> Any:
        self.asked.append((target.name, topology))
        return one_device()

    def compile_on(self, mesh: Any, function: Any, arguments: Any, give_up: Any = ()) -> Compiled:
        assert give_up == (STATE,)
        said = self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    """In every toolchain's place; it has 1000 bytes of arguments, 50 of new results, 7 of temporaries and 1 of code."""
    monkeypatch.setattr(command, "TOOLCHAINS", {"gpu": Stand, "tpu": Stand})
    monkeypatch.setattr(Stand, "said", [Compiled((), 2.5, 1, 7, 1000, 450, 400)] * 4, raising=False)
    monkeypatch.setattr(Stand, "asked", [], raising=False)
    return Stand


def line(folder: Path, *more: str) -> list[str]:
    return [
        "compile",
        str(folder),
        "--tokens",
        "64",
        "--rows",
        "3",
        "--context",
        "96",
        "--mesh",
        "1x1",
        *more,
    ]


def test_a_whole_model_is_what_the_compiler_says(
    stand: type[Stand], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    targets = ("--target", "sm_90a", "--target", "v6e:4x4")
    assert run(line(folder, *targets, "--json", str(out))) == 0
    assert stand.asked == [("sm_90a", None), ("v6e", "4x4")]
    figures = json.loads(out.read_text())
    assert (figures["layers"], figures["tokens"], figures["rows"], figures["context"]) == (6, 64, 3, 96)
    assert [(record["program"], record["target"]) for record in figures["programs"]] == [
        (program, target) for target in ("sm_90a", "v6e") for program in ("prefill", "decode")
    ]
    for record in figures["programs"]:
        assert record["layers"] == 6 and record["operators"] == "xla" and record["compile_s"] == 2.5
        assert record["new_output_bytes"] == 50 and record["temporary_bytes"] == 7
        assert record["total_bytes"] == record["all_layers"]["total_bytes"] == 1000 + 50 + 7 + 1
    assert "without seconds" not in capsys.readouterr().out


def test_one_of_each_stands_for_all_and_says_so(
    stand: type[Stand],
    tiny_k3: ModelConfig,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    assert run(line(folder, "--target", "sm_80", "--one-of-each", "--json", str(out))) == 0
    shown = capsys.readouterr().out
    mesh = AbstractMesh((1, 1), AXES)
    for record, whole in zip(json.loads(out.read_text())["programs"], programs(tiny_k3, mesh, CALLS)):
        # a block of residuals less than the whole has
        residual = whole.residual_bytes // 3
        assert (record["layers"], record["total_bytes"]) == (3, 1058)
        of_all = record["all_layers"]
        assert of_all["parameter_bytes"] == whole.parameter_bytes > record["parameter_bytes"]
        assert of_all["state_bytes"] == whole.state_bytes > record["state_bytes"]
        assert of_all["total_bytes"] == whole.parameter_bytes + whole.state_bytes + residual + 58
    assert shown.count(" 6 │") == 2 and "Rows without seconds: parameters and state of all layers" in shown


def test_what_does_not_compile_is_one_line_behind_what_did(
    stand: type[Stand],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(stand, "said", [RuntimeError("out of\nmemory"), stand.said[0]])
    assert run(line(folder, "--target", "v6e", "--json", str(out))) == 1
    shown, error = capsys.readouterr()
    assert error == "kda_jax: prefill does not compile: out of memory\n"
    assert "decode" in shown
    assert [record["wrong"] is None for record in json.loads(out.read_text())["programs"]] == [False, True]


@pytest.mark.parametrize(
    "more, words",
    [
        (["--target", "sm_1"], "no target 'sm_1' is known; give one of sm_90a, sm_80, v5e, v6e"),
        (["--target", "v6e", "--mesh", "8by8"], "'8by8' is no mesh"),
        (
            ["--target", "v6e", "--tokens", "97"],
            "97 tokens do not fit into a context of 96; give --context 97",
        ),
        (["--target", "sm_90a"], "JAX's CUDA plugin is not installed; `make check` installs it"),
    ],
    ids=["target", "mesh", "context", "tools"],
)
def test_a_mistake_is_one_line(
    more: list[str],
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(folder: Path) -> None:
        raise Missing("JAX's CUDA plugin is not installed; `make check` installs it")

    monkeypatch.setattr(command, "TOOLCHAINS", {"gpu": missing, "tpu": missing})
    assert run(line(folder, *more)) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def toolchain(make: Any, folder: Path) -> Any:
    try:
        return make(folder)
    except Missing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "make, name", [(gpu.GpuToolchain, "sm_90a"), (tpu.TpuToolchain, "v6e")], ids=["gpu", "tpu"]
)
def test_k3s_decode_step_compiles_for_devices_that_are_not_there(
    make: Any, name: str, tiny_k3: ModelConfig, tmp_path: Path
) -> None:
    (target,) = (target for target in TARGETS if target.name == name)
    tools = toolchain(make, tmp_path)
    mesh = tools.mesh(target, (2, 2), AXES)
    decode = programs(one_of_each(tiny_k3), mesh, CALLS)[1]
    made = tools.compile_on(mesh, decode.function, decode.arguments, (STATE,))
    if name == "v6e":  # which lays arrays out in tiles
        assert made.argument_bytes > used(decode, tiny_k3) and made.reused_bytes > decode.state_bytes - COPIES
    else:
        assert made.argument_bytes == used(decode, tiny_k3)
        assert made.reused_bytes == decode.state_bytes - COPIES
    assert made.temporary_bytes > 0


@pytest.mark.parametrize(
    "make, name, shape, topology, words",
    [
        (gpu.GpuToolchain, "sm_90a", (2, 2), "2x2", "sm_90a takes no topology, got '2x2'"),
        (tpu.TpuToolchain, "v6e", (2, 3), None, "libtpu has no topology v6e:2x3: .* name one of 6 devices"),
        (tpu.TpuToolchain, "v6e", (2, 2), "4x4", "v6e:4x4 has 16 devices, the mesh 4; make them equal"),
    ],
    ids=["gpu", "tpu-unknown", "tpu-other-size"],
)
def test_a_topology_that_is_none_is_refused(
    make: Any, name: str, shape: tuple[int, int], topology: str | None, words: str, tmp_path: Path
) -> None:
    (target,) = (target for target in TARGETS if target.name == name)
    with pytest.raises(ValueError, match=words):
        toolchain(make, tmp_path).mesh(target, shape, AXES, topology)
