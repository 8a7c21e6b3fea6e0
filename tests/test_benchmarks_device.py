"""`python -m benchmarks.device`, rehearsed: it runs through without a GPU, and says what is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import device
from benchmarks.contestant import Absent
from benchmarks.on_device import fla_triton
from benchmarks.on_device.checks import checks
from benchmarks.on_device.clock import Call, time_calls
from benchmarks.on_device.judge import Check, judge

APP = typer.Typer()
APP.command()(device.main)


def double(x: Any, *, implementation: str) -> Any:
    """Right in the definition; wrong, if by little, elsewhere."""
    return x * 2 if implementation == "reference" else x * 2.001


def test_a_rehearsal_reports_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "checks", lambda little: itertools.islice(checks(little=little), 1))
    report = tmp_path / "new" / "device.json"
    result = CliRunner().invoke(APP, ["--rehearse", "--json", str(report)])
    assert result.exit_code == 0, result.output
    said = json.loads(report.read_text())
    assert said["rehearsal"] and "copy_bytes_per_s" not in said["machine"]
    (check,) = said["checks"]
    assert check["name"] == "kda_prefill, softplus" and 0 < check["error"] < check["bound"] == 5e-6
    assert [(record["impl"], record["act"]) for record in said["results"]] == [
        ("kda-jax", act) for act in ("forward", "both", "step")
    ]
    assert all(record["median_ms"] > 0 and record["error"] == 0 for record in said["results"])
    assert "fla" in said["absent"] and "not here: fla" in result.output


def test_a_wrong_kernel_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(little: bool) -> Iterator[Check]:
        yield Check("doubling", double, (np.arange(5, dtype=np.float32),), 1e-4)

    monkeypatch.setattr(device, "checks", wrong)
    result = CliRunner().invoke(APP, ["--rehearse"])
    assert result.exit_code == 1
    assert "device: doubling, float32: differs from float64 by 5.0e-04, 1.0e-04 is allowed" in result.stderr


def test_what_a_check_finds() -> None:
    x = np.arange(5, dtype=np.float32)
    assert judge(Check("", double, (x,), 1e-3), "triton")["wrong"] is None
    assert "differs" in judge(Check("", double, (x,), 1e-4), "triton")["wrong"]

    def nowhere(x: Any, *, implementation: str) -> Any:
        if implementation != "reference":
            raise ValueError("not on this device\nat all")
        return x

    assert judge(Check("", nowhere, (x,), 1.0), "triton")["wrong"] == "ValueError: not on this device"

    def broken(x: Any, *, implementation: str) -> Any:
        return x if implementation == "reference" else x / 0

    assert "differs from float64 by nan" in judge(Check("", broken, (x,), 1.0), "triton")["wrong"]


def test_every_kernel_is_checked_in_both_dtypes() -> None:
    found = [(check.name, str(check.arrays[0].dtype)) for check in checks(little=True)]
    assert len(set(found)) == len(found)
    assert {name for name, dtype in found if dtype == "float32"} == {
        name for name, dtype in found if dtype == "bfloat16"
    }


def test_without_a_gpu_it_is_one_line() -> None:
    result = CliRunner().invoke(APP, [])
    assert result.exit_code == 1 and result.stderr.startswith("device: JAX sees no GPU here")
    assert result.stderr.count("\n") == 1


def test_a_wheel_that_is_none_leaves_fla_out(tmp_path: Path) -> None:
    wheel = tmp_path / "fla_core.whl"
    wheel.write_text("no archive")
    with pytest.raises(Absent, match="no wheel to read"):
        fla_triton.unpack(wheel)


def test_calls_are_waited_for_and_take_turns() -> None:
    events: list[str] = []

    def call(name: str) -> Call:
        return Call(lambda: events.append(name), lambda _: events.append(f"{name} done"))

    timings = time_calls({"a": call("a"), "b": call("b")}, rounds=3)
    assert {name: timing.rounds for name, timing in timings.items()} == {"a": 3, "b": 3}
    waits = [event for event in events if event.endswith("done")]
    assert waits == [f"{name} done" for name in "aabbabbaab"]
    assert events[-1] == "b done" and min(timings["a"].seconds) > 0
