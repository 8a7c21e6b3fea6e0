"""`bench transfer` runs, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import restore, transfer
from kda_jax.config import ModelConfig


def test_samples_have_the_published_sizes() -> None:
    k3 = ModelConfig.kimi_k3()
    shapes = transfer.shapes(k3)
    assert sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes.values()) == 449_372_160
    shard = transfer.shapes(k3, transfer.SHARDS)
    assert 58e6 < sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shard.values()) < 68e6


def test_restoring_wins_from_the_length_after_which_it_always_does() -> None:
    records = [{"tokens": at, "compute_ms": at, "disk_ms": ms} for at, ms in ((1, 0), (2, 3), (4, 3), (8, 3))]
    assert restore.wins(records, "disk") == 4
    assert restore.wins(records[:2], "disk") is None


@pytest.mark.slow
def test_every_store_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mooncake.store", reason="Mooncake's library is not there", exc_type=ImportError)
    file = tmp_path / "out" / "transfer.json"
    transfer.main(json=file, quick=True)
    report = json.loads(file.read_text())
    assert "of bare" in capsys.readouterr().out
    found = {(each["op"], each["store"], each["level"]): each for each in report["results"]}
    for op in ("put", "get"):
        for store in ("memory", "disk", "mooncake"):
            for level in ("objects", "checkpoint"):
                record = found[op, store, level]
                assert record["seconds"] > 0 and record["ratio_to_bare"] > 0
                assert record["copied"] <= 1.02 * record["nbytes"]  # a manifest beside the arrays
        assert found[op, transfer.BARE, None]["ratio_to_bare"] == 1
    assert [each["tokens"] for each in report["restore"]] == list(restore.LENGTHS[:2])
