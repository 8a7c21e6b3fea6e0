"""The README tells the truth: its example runs, and its tree is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "tiny").symlink_to(byte_model)
    monkeypatch.chdir(tmp_path)
    exec(compile(block[1], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "def run(self" in out and "def stop(self" in out
    assert (tmp_path / "late.safetensors").exists()


def test_the_caches_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "cache" / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    exec(compile(block[1], "cache/README.md", "exec"), {})
    assert capsys.readouterr().out == "960\n"


def test_the_transfers_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "transfer" / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "transfer/README.md", "exec"), {})
    assert capsys.readouterr().out == "512 (1, 4, 64, 64)\n"


def test_the_tree_is_there() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    top = ""
    for line in tree.strip().splitlines():
        name = line.split()[0]
        top = "" if not line.startswith(" ") else top
        assert (ROOT / top / name).exists(), line
        top = name if not line.startswith(" ") else top
