"""The command line: what it prints, and that a user's mistake is one line and an exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kda_jax.commands import forks, run
from kda_jax.commands.demo import BOUNDARIES
from kda_jax.commands.sizes import sizes, state_bytes
from kda_jax.config import ModelConfig

TENSOR = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def checkpoint(goldens: Path, tmp_path: Path) -> Path:
    """A small sound checkpoint without a tokenizer, free to be spoiled."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(goldens / "kimi_linear_tiny" / name, folder / name)
    return folder


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def nothing(folder: Path) -> None:
    pass


MISTAKES = [
    ("no_path", nothing, "generate nowhere --token-ids 1", ["no such path: nowhere"]),
    ("no_path_info", nothing, "info nowhere", ["no such path: nowhere", "kimi_k3"]),
    ("no_path_convert", nothing, "convert nowhere out", ["no such path: nowhere"]),
    ("no_path_demo", nothing, "demo --model nowhere", ["no model at nowhere"]),
    ("no_store_demo", nothing, "demo --store tape", ["'tape' is no kind of store", "disk or mooncake"]),
    ("no_state", nothing, "generate MODEL --token-ids 1 --resume nowhere", ["nowhere"]),
    ("other_model", lambda f: edit_config(f, model_type="llama"), "generate MODEL --token-ids 1", ["llama"]),
    ("other_model_info", lambda f: edit_config(f, model_type="llama"), "info MODEL", ["llama"]),
    (
        "missing_and_surplus",
        lambda f: edit_tensors(f, lambda t: t.update({"model.extra": t.pop(TENSOR)})),
        "generate MODEL --token-ids 1",
        ["missing (1): " + TENSOR, "surplus (1): model.extra"],
    ),
    (
        "wrong_shape",
        lambda f: edit_tensors(f, lambda t: t.update({TENSOR: t[TENSOR][:5].copy()})),
        "generate MODEL --token-ids 1",
        [TENSOR, "shape [5, 32], expected [48, 32]"],
    ),
    (
        "truncated",
        cut_short,
        "generate MODEL --token-ids 1",
        ["model.safetensors", "no whole safetensors file"],
    ),
    (
        "nan",
        lambda f: edit_tensors(f, lambda t: t[TENSOR].__setitem__((2, 3), np.nan)),
        "generate MODEL --token-ids 1",
        ["NaN", TENSOR],
    ),
    ("token_too_large", nothing, "generate MODEL --token-ids 5,199", ["199"]),
    ("token_negative", nothing, "generate MODEL --token-ids=-1", ["-1"]),
    ("token_no_number", nothing, "generate MODEL --token-ids a", ["whole numbers"]),
    ("empty_prompt", nothing, "generate MODEL --token-ids=", ["the prompt is empty"]),
    (
        "empty_file",
        lambda f: (f / "p").write_text(""),
        "generate MODEL --prompt-file MODEL/p",
        ["prompt is empty"],
    ),
    ("no_prompt", nothing, "generate MODEL", ["give one prompt"]),
    ("no_tokenizer", nothing, "generate MODEL --prompt-file MODEL/config.json", ["holds no tokenizer"]),
    (
        "too_long",
        lambda f: edit_config(f, model_max_length=8),
        "generate MODEL --token-ids 1,2,3,4,5,6,7,8,9",
        ["8"],
    ),
    ("target_exists", nothing, "convert MODEL MODEL", ["exists already"]),
    ("no_device_info", nothing, "info tiny --device h20", ["no device 'h20' is known", "h200"]),
    ("no_mesh_info", nothing, "info tiny --mesh 8by8", ["'8by8' is no mesh", "8x4"]),
    ("uneven_mesh_info", nothing, "info tiny --mesh 4x1", ["kda_num_heads=2 is not a multiple"]),
]


@pytest.mark.parametrize(
    ("spoil", "line", "texts"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_mistake_is_one_line(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], spoil: Callable, line: str, texts: list[str]
) -> None:
    spoil(checkpoint)
    code = run([word.replace("MODEL", str(checkpoint)) for word in line.split()])
    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert err.startswith("kda_jax: ") and err.count("\n") == 1, err
    for text in texts:
        assert text in err


@pytest.mark.parametrize("line", ["info", "nonsense", "generate x --top-k none", "bench nonsense"])
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run(line.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_traceback_shows_where_it_came_from(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        run(["--traceback", "generate", str(checkpoint), "--token-ids", "9999"])


def test_a_process_ends_with_one_line(checkpoint: Path) -> None:
    cut_short(checkpoint)
    command = [sys.executable, "-m", "kda_jax", "generate", str(checkpoint), "--token-ids", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no whole safetensors file" in done.stderr


def test_k3_sizes() -> None:
    k3 = sizes(ModelConfig.kimi_k3())
    assert round(k3.total / 1e12, 2) == 2.78
    assert round(k3.active / 1e9) == 104
    assert 1.42e12 < k3.stored_nbytes < 1.57e12
    state = state_bytes(ModelConfig.kimi_k3())
    assert (state.recurrent, state.conv, state.checkpoint) == (434_110_464, 15_261_696, 449_372_160)
    assert state.latent_per_token == 27_648


def test_sizes_count_what_a_model_holds(goldens: Path) -> None:
    held = load_file(goldens / "kimi_linear_tiny" / "model.safetensors")
    config = ModelConfig.from_hf(json.loads((goldens / "kimi_linear_tiny" / "config.json").read_text()))
    assert sizes(config).total == sum(tensor.size for tensor in held.values())


def test_info_writes_json(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "model.safetensors").unlink()  # shapes alone
    assert run(["info", str(checkpoint), "--json", str(tmp_path / "info.json")]) == 0
    figures = json.loads((tmp_path / "info.json").read_text())
    assert figures["weight_bytes"]["float32"] == 4 * figures["parameters"]["total"] == 4 * 203_380
    row = figures["state_bytes"]["1024"]
    # 28 channels of latent; 2 * 3 heads of 12 + 10 in 5 layers; bfloat16
    assert row["latents"] == 1024 * 28 * 2 and row["plain_attention"] == 1024 * 5 * 3 * 22 * 2
    assert row["state"] == row["latents"] + figures["checkpoint_bytes"]["total"]
    assert "203,380" in capsys.readouterr().out


def test_generate_resumes_from_its_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(*words: object) -> list[int]:
        assert run(["generate", str(checkpoint), *map(str, words)]) == 0
        return [int(word) for word in capsys.readouterr().out.split()]

    whole = tokens("--token-ids", "5,6,7", "--max-new-tokens", 8)
    state = tmp_path / "state.safetensors"
    first = tokens("--token-ids", "5,6,7", "--max-new-tokens", 4, "--save-state", state)
    assert len(whole) == 8 and first == whole[:4]
    assert tokens("--token-ids", whole[4], "--max-new-tokens", 3, "--resume", state) == whole[5:]


def test_generate_writes_text(byte_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "generate",
        str(byte_model),
        "def f",
        "--max-new-tokens",
        "12",
        "--temperature",
        "1",
        "--seed",
        "7",
    ]
    assert run(line) == 0
    streamed = capsys.readouterr().out
    assert len(streamed) > 3
    assert run([*line, "--save-state", str(byte_model / "state.safetensors")]) == 0
    assert capsys.readouterr().out == streamed


def test_convert_there_and_back(byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = tmp_path / "orbax", tmp_path / "back"
    assert run(["convert", str(byte_model), str(there)]) == 0
    assert run(["convert", str(there), str(back)]) == 0
    assert "orbax" in capsys.readouterr().out
    first, last = (load_file(folder / "model.safetensors") for folder in (byte_model, back))
    assert first.keys() == last.keys()
    assert all(np.array_equal(first[name], last[name]) for name in first)
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((byte_model / name).read_text()) == json.loads((back / name).read_text())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A text to read."""
    lines = [f"value_{i} = {i * i}\n" + "\n" * (i % 9 == 0) for i in range(200)]
    path = tmp_path / "source.py"
    path.write_text("".join(lines))
    return path


@pytest.mark.optimised
@pytest.mark.parametrize("store", ["disk", "mooncake"])
@pytest.mark.slow
def test_demo_resumes_to_the_bit(
    byte_model: Path, source: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if store == "mooncake":
        pytest.importorskip("mooncake.store", reason="Mooncake's library is not there", exc_type=ImportError)
    chosen = ["--store", store] if store != "disk" else []  # the default
    assert (
        run(["demo", "--model", str(byte_model), "--source", str(source), "--new-tokens", "5", *chosen]) == 0
    )
    out = capsys.readouterr().out
    assert out.count(" yes ") == 3 and " NO " not in out
    assert out.count("│ this ") == 2


def test_demo_fails_when_one_bit_differs(
    byte_model: Path, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = np.ones((2, 260), np.float32)
    other = logits.copy()
    other.view(np.uint32)[1, 5] ^= 1
    tokens = np.zeros(2, np.int32)

    def compare(
        model: object, folder: Path, prompt: list[int], found: list[forks.Fork], new_tokens: int, store: str
    ) -> list:
        right, wrong = forks.Run(logits, tokens, 1.0), forks.Run(other, tokens, 1.0)
        return [forks.Row(fork, right, wrong if fork is found[1] else right, 1, "here") for fork in found]

    monkeypatch.setattr(forks, "compare", compare)
    assert run(["demo", "--model", str(byte_model), "--source", str(source)]) == 1
    out, err = capsys.readouterr()
    assert out.count(" yes ") == 2 and out.count(" NO ") == 1
    assert "not bit-identical" in err and str(BOUNDARIES[1]) in err
