"""`info --mesh --device`: bytes on each device, against arithmetic on the models' sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kda_jax.commands import run
from kda_jax.commands.devices import DEVICES, Device, MeshShape, mesh_shape
from kda_jax.commands.placement import describe, describe_counts
from kda_jax.commands.sizes import Sizes, sizes, state_bytes
from kda_jax.config import ModelConfig
from pallas_kernels.check.targets import TARGETS

K3 = ModelConfig.kimi_k3()
MOE, KDA, MLA = 92, 69, 24  # layers of K3


@pytest.fixture(scope="module")
def counts() -> list[dict[str, Any]]:
    """K3 on 1, 2, 4, .. devices."""
    return describe_counts(K3, DEVICES["h200"])


@pytest.fixture(scope="module")
def of_all() -> Sizes:
    """K3's own sizes."""
    return sizes(K3)


def on_mesh(counts: list[dict[str, Any]], mesh: str) -> dict[str, Any]:
    return next(row for row in counts if row["mesh"] == mesh)


@pytest.mark.parametrize("shape", [MeshShape(8, 8), MeshShape(2, 1)], ids=str)
def test_k3_on_a_mesh_is_what_its_sizes_say(
    counts: list[dict[str, Any]], of_all: Sizes, shape: MeshShape
) -> None:
    parts, heads = on_mesh(counts, str(shape))["parameter_bytes"]["parts"], shape.tensor
    # four bits a number and a byte for 32 of them, over all devices
    assert parts["routed experts"] == of_all.parts["routed experts"] // 32 * 17 // shape.count
    assert parts["router"] == 4 * of_all.parts["router"]  # float32, whole on each
    for part in ("embedding", "head", "dense feed-forward", "shared experts"):
        assert parts[part] == 2 * of_all.parts[part] // heads, part
    # up and down over the heads' devices, the latents' norm whole
    assert parts["expert latents"] == MOE * (2 * 2 * 7168 * 3584 // heads + 2 * 3584)
    # q, k, v, two gates and beta of 96 heads of 128, taps, the decay's second matrix, output; float32 A and bias; norm
    wide = 7168 * (3 * 12288 + 128 + 12288 + 96) + 4 * 3 * 12288 + 128 * 12288 + 12288 * 7168
    assert parts["KDA attention"] == KDA * ((2 * wide + 4 * (96 + 12288)) // heads + 2 * 128)
    # down to queries' and keys' latents, the shared key part and the gate; up from each; output; two norms
    wide = 7168 * (1536 + 512 + 64 + 12288) + 1536 * 96 * 192 + 512 * 96 * 256 + 12288 * 7168
    assert parts["MLA attention"] == MLA * (2 * wide // heads + 2 * (1536 + 512))


def test_one_device_holds_everything(counts: list[dict[str, Any]], of_all: Sizes) -> None:
    figures = on_mesh(counts, "1x1")
    routed = of_all.parts["routed experts"]
    # beside the experts all is bfloat16 but for router, A_log and dt_bias; our A_log has no padding
    wide = 2 * (of_all.parts["router"] + KDA * (96 + 12288))
    padding = 2 * KDA * (128 - 96)
    held = figures["parameter_bytes"]
    assert held["total"] == routed // 32 * 17 + 2 * (of_all.total - routed) + wide - padding
    assert held["total"] == sum(held["parts"].values())
    assert figures["state_bytes"]["1024"]["state"] == state_bytes(K3).at(1024)


def test_states_lie_with_their_heads_and_latents_on_every_device(counts: list[dict[str, Any]]) -> None:
    for tokens, row in on_mesh(counts, "8x8")["state_bytes"].items():
        assert row["latents"] == int(tokens) * 27_648
        assert row["state"] - row["latents"] == (434_110_464 + 15_261_696) // 8


def test_a_sequence_fits_to_the_last_byte() -> None:
    tiny, shape = ModelConfig.tiny(), MeshShape(2, 2)
    figures = describe(tiny, shape, None)
    held, state = figures["parameter_bytes"]["total"], figures["state_bytes"]["1024"]["state"]

    def with_memory(nbytes: int) -> tuple[bool, int]:
        on = describe(tiny, shape, Device("card", nbytes))
        return on["fits"], on["sequences"]["1024"]

    assert with_memory(held + 3 * state) == (True, 3)
    assert with_memory(held + 3 * state - 1) == (True, 2)
    assert with_memory(held) == (True, 0)
    assert with_memory(held - 1) == (False, 0)


def test_counts_go_as_far_as_experts_divide(counts: list[dict[str, Any]]) -> None:
    assert [row["mesh"] for row in counts] == ["1x1", "2x1", "4x1", "8x1", "8x2", "8x4", "8x8", "8x16"]
    assert [row["devices"] for row in counts if row["fits"]] == [16, 32, 64, 128]


def test_info_shows_a_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, model = tmp_path / "info.json", "kimi_linear_48b"
    assert run(["info", model, "--mesh", "2x2", "--device", "v5e", "--json", str(report)]) == 0
    figures = json.loads(report.read_text())["mesh"]
    shown = capsys.readouterr().out
    assert figures == describe(ModelConfig.kimi_linear_48b(), MeshShape(2, 2), DEVICES["v5e"])
    assert "does not fit" in shown and f"{figures['parameter_bytes']['total']:,}" in shown


def test_info_shows_how_many_devices_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "tiny", "--device", "v5e"]) == 0
    shown = capsys.readouterr().out
    assert "What fits on TPU v5e" in shown and "2x1" in shown and "4x1" not in shown  # of two heads


def test_what_is_compiled_for_has_the_memory_that_info_counts() -> None:
    names = {"sm_90a": "h200", "sm_80": "a100", "v5e": "v5e", "v6e": "v6e"}
    assert {target.name: target.memory_bytes for target in TARGETS} == {
        target: DEVICES[name].memory_bytes for target, name in names.items()
    }


@pytest.mark.parametrize("text", ["8", "8x", "8by8", "0x8", "8x8x8", "-1x2", " 8x8", "8x8\n"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(Exception, match=r"is no mesh; write 8x4 for 32 devices"):
        mesh_shape(text)


def test_a_mesh_is_heads_times_the_rest() -> None:
    assert mesh_shape("8x4") == MeshShape(tensor=8, expert=4) and mesh_shape("8x4").count == 32
