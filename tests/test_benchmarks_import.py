"""`bench import`: a checkpoint of the size asked for, a report of what was kept, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest

from benchmarks import importing
from benchmarks.synthetic_checkpoint import config_of_size
from kda_jax.commands import run
from kda_jax.config import ModelConfig
from kda_jax.weights.names import hf_shapes, parameters_and_nbytes
from random_model import K3, small_config


@pytest.mark.parametrize("nbytes", [700_000_000, 2_000_000_000])
def test_as_many_experts_as_the_bytes_take(nbytes: int) -> None:
    config = config_of_size(nbytes)
    more = dataclasses.replace(config, num_experts=config.num_experts + 1)
    sizes = [parameters_and_nbytes(hf_shapes(each))[1] for each in (config, more)]
    assert sizes[0] <= nbytes < sizes[1]
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_the_report_says_what_was_kept_and_the_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(**K3, num_experts=16)
    asked: list[int] = []
    monkeypatch.setattr(importing, "config_of_size", lambda nbytes: asked.append(nbytes) or config)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert (
        run(["bench", "import", "--gb", "0.5", "--shards", "3", "--quick", "--json", str(tmp_path / "f")])
        == 0
    )
    assert asked == [500_000_000]
    assert list((tmp_path / "temporary").iterdir()) == []
    report = json.loads((tmp_path / "f").read_text())
    padding = 4 * (128 - 2)  # of A_log, in one layer
    router = 2 * 16 * 24  # kept in float32, stored in bfloat16
    stored = parameters_and_nbytes(hf_shapes(config))[1]
    assert report["memory"]["kept"] == stored - padding + router
    assert 0 < report["memory"]["peak_over_kept"] < 32 << 20
    assert report["checkpoint"]["shards"] == 3 and report["checkpoint"]["experts"] == 16
    assert report["checkpoint"]["largest_tensor"] == 2 * 67 * 24  # the embedding
    assert stored < report["checkpoint"]["nbytes"] < 3 * stored
    times = report["time"]
    for act in ("read", "stream"):
        assert times[f"ratio_to_{act}"] == pytest.approx(times["import_median_s"] / times[f"{act}_median_s"])
        assert 0 < times[f"{act}_s"] <= times[f"{act}_median_s"]
    assert "Import, beside reading the same bytes" in capsys.readouterr().out


def test_too_few_bytes_are_a_mistake_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "import", "--gb", "0.01"]) == 1
    assert "cannot hold 16 experts; take" in capsys.readouterr().err
