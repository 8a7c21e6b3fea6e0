"""The examples: each does what its page says, with small numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversation
import explain
import jax
import jax.numpy as jnp
import jitted
import numpy as np
import optax
import pytest
import two_instances
import typer
from flax import nnx
from safetensors.numpy import load_file
from typer.testing import CliRunner

import kda_jax
import linen_bridge
import recall
import train_tiny
from kda_jax import Model, split
from tiny_lm import corpus, optimizer
from tiny_lm.plan import Phase, Plan
from tiny_lm.train import Run, Trainee, read_losses
from transfer import Unavailable
from transfer.mooncake import MooncakeSettings
from transfer.mooncake.library import load as load_mooncake

TASK = recall.Task(pairs=2, keys=4, values=4)
MODEL = dict(
    vocab_size=260, hidden_size=16, layers=["kda", "mla"], mlps=["dense", "moe"], intermediate_size=16,
    model_max_length=1 << 16, kda_num_heads=1, kda_head_dim=16, num_heads=1, kv_lora_rank=8, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, num_experts=4, experts_per_token=2, moe_intermediate_size=8,
    num_shared_experts=1, bos_token_id=256, eos_token_id=257, pad_token_id=258,
)  # fmt: skip
PLAN = Plan(model=MODEL, phases=(Phase(steps=6, batch=2, length=32, micro=1),), seed=1)


@pytest.fixture
def lenient_optax(monkeypatch: pytest.MonkeyPatch) -> None:
    """optax multiplies floats by integer counts, which strict promotion forbids; all else here stays strict."""

    def lenient(make: Callable[..., optax.GradientTransformation]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> optax.GradientTransformation:
            inner = make(*args, **options)

            def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
                with jax.numpy_dtype_promotion("standard"):
                    return inner.update(updates, state, params)

            return optax.GradientTransformation(inner.init, update)

        return made

    monkeypatch.setattr(optax, "adamw", lenient(optax.adamw))
    monkeypatch.setattr(optimizer, "muon", lenient(optimizer.muon))


def command(function: Callable[..., None]) -> typer.Typer:
    app = typer.Typer()
    app.command()(function)
    return app


def test_recall_asks_for_what_was_read() -> None:
    task = recall.Task(pairs=5, keys=7, values=3)
    sequences = task.draw(np.random.default_rng(0), 9)
    for pairs, queries, answers in zip(*sequences):
        read = dict(pairs.reshape(-1, 2).tolist())
        assert len(read) == 5 and set(read) == set(queries.tolist()) and max(read) < 7 <= min(read.values())
        assert [read[query] - 7 for query in queries.tolist()] == answers.tolist()
    assert any(list(row[::2]) != list(asked) for row, asked in zip(sequences.pairs, sequences.queries))


@pytest.mark.slow  # compiles KDA's gradient
@pytest.mark.usefixtures("lenient_optax")
def test_recall_learns_and_its_seed_decides_all() -> None:
    reported: list[tuple[int, float]] = []
    options: dict[str, Any] = dict(steps=30, seed=0, batch=16, rate=2e-2, test_rows=256)
    one = recall.train(TASK, **options, report=lambda *step: reported.append(step))
    assert reported == list(enumerate(one.losses, start=1)) and len(reported) == 30
    assert abs(one.before - 1 / TASK.values) < 0.1
    assert one.losses[-1] < 0.5 * one.losses[0] and one.after > 0.75
    assert recall.train(TASK, **options) == one


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--pairs 65", "pairs=65 needs as many distinct keys"),
        ("--pairs 0", "choose 1 to 64"),
        ("--values 1", "values=1 leaves nothing to choose"),
        ("--steps 0", "steps=0"),
        ("--layers 0", "layers=0"),
        ("--seed -1", "seed=-1 must be a number from 0 to 4294967295"),
    ],
    ids=lambda value: value.strip("-") if value.startswith("-") else None,
)
def test_recall_refuses_in_one_line(options: str, words: str) -> None:
    result = CliRunner().invoke(command(recall.main), options.split())
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("recall: ") and result.stderr.count("\n") == 1 and words in result.stderr


@pytest.mark.slow  # compiles KDA's gradient
def test_linen_carries_parameters_and_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = linen_bridge.compare()
    assert found.outputs_differ < 1e-5 and found.states_differ < 1e-5
    assert {name.split(".")[0] for name in found.gradient} == {"kda", "mla"}
    assert min(found.gradient.values()) > 0.0
    monkeypatch.setattr(linen_bridge, "compare", lambda: found)
    linen_bridge.main()
    assert "two calls differ from one by at most" in capsys.readouterr().out


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of six files of Python that have no line in common."""
    folder, words = tmp_path / "sources", random.Random(0)
    folder.mkdir()
    for name in "abcdef":
        lines = [f"{name}_{words.randrange(10**6)} = {words.randrange(10**9)}\n" for _ in range(70)]
        (folder / f"{name}.py").write_text("".join(lines))
    return folder


@pytest.mark.slow  # compiles KDA's gradient
@pytest.mark.usefixtures("lenient_optax")
def test_a_training_run_that_was_stopped_is_the_run_that_was_not(sources: Path, tmp_path: Path) -> None:
    files = corpus.split_sources(corpus.find_sources(sources), seed=PLAN.seed)
    (tmp_path / "whole").mkdir()
    whole = Run(PLAN, tmp_path / "whole", files.train)
    bits = [done.bits for done in whole]

    out = tmp_path / "stopped"
    out.mkdir()
    PLAN.save(out / "plan.json")
    for done in Run(PLAN, out, files.train, save_every=2):
        if done.step == 5:  # one step beyond the last checkpoint
            break
    # The run obeys its plan, not what it is told later.
    train_tiny.train(out, minutes=1.0, steps=1, seed=0, source=sources)
    log = read_losses(out / "losses.csv")
    assert [done.step for done in log] == [1, 2, 3, 4, 5, 6] and [done.bits for done in log] == bits

    train_tiny.store_model(whole.model(), tmp_path / "model")
    want, got = (load_file(each / "model.safetensors") for each in (tmp_path / "model", out / "model"))
    assert want.keys() == got.keys() and all(np.array_equal(want[name], got[name]) for name in want)

    metrics = json.loads((out / "model" / "metrics.json").read_text())
    assert metrics["held_out"]["files"].keys() == {source.name for source in files.held_out}
    assert 0.0 < metrics["bits_per_byte"] < 12.0
    assert metrics["training"]["steps"] == 6 and metrics["training"]["seed"] == PLAN.seed
    assert metrics["training"]["tokens"] == 6 * 2 * 32
    assert (out / "model" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"phases": []}', "\xff", json.dumps({"phases": [], "model": MODEL})],
    ids=["cut", "list", "empty", "no-model", "no-text", "no-phase"],
)
def test_a_spoiled_plan_is_one_line(sources: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    options = ["--out", str(tmp_path), "--source", str(sources)]
    result = CliRunner().invoke(command(train_tiny.main), options)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert f"{tmp_path / 'plan.json'} is no plan of a run" in result.stderr


def test_a_plan_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_every_step_has_its_place_in_a_phase() -> None:
    short, long = Phase(steps=3, batch=2, length=32, micro=1), Phase(steps=2, batch=1, length=64, micro=1)
    plan = Plan(model=MODEL, phases=(short, long))
    assert [plan.phase_of(step) for step in range(plan.steps)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    with pytest.raises(ValueError, match="has 5 steps"):
        plan.phase_of(5)


def test_a_model_is_put_together_as_it_was_taken_apart() -> None:
    config = PLAN.config
    leaves = jax.tree.leaves(split(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))[1])
    arrays = [jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape) for leaf in leaves]
    params = dict(zip(Trainee(config).paths, arrays))
    parts = optimizer.take_apart(params, config)
    assert len(parts) > len(params) == len(leaves)
    again = optimizer.put_together(parts, config)
    assert again.keys() == params.keys() and all(np.array_equal(params[name], again[name]) for name in params)


def test_a_plan_of_minutes_counts_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        """Steps of the first phase take a second, of the next two seconds, and so on."""

        def __init__(self, *_: object) -> None: ...

        def seconds_per_step(self, phase: int) -> float:
            return phase + 1.0

    monkeypatch.setattr(train_tiny, "Run", Timed)
    plan = train_tiny._plan(None, 60.0, 0, ())
    seconds = sum(phase.steps * (index + 1.0) for index, phase in enumerate(plan.phases))
    assert len(plan.phases) > 1 and abs(seconds - 3600.0) < 10.0


def test_jitted_functions_write_what_generate_writes() -> None:
    model, tokenizer = kda_jax.load(jitted.MODEL, dtype="float32"), kda_jax.load_tokenizer(jitted.MODEL)
    for opening, text in jitted.run(count=8):
        prompt = tokenizer.encode(jitted.PROMPT + opening)
        assert text == kda_jax.generate(model, prompt, max_new_tokens=8, tokenizer=tokenizer).text


def test_a_turn_of_a_conversation_computes_its_new_lines_alone() -> None:
    turns = conversation.run(count=6)
    assert [turn.cached for turn in turns[:3]] == [0, *(turn.prompt + 6 - 1 for turn in turns[:2])]
    assert turns[3].cached == turns[2].cached


def test_a_conversation_goes_on_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        load_mooncake(MooncakeSettings())
    except Unavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(jax.config.jax_compilation_cache_dir))  # pyright: ignore
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    first, second = two_instances.run(count=6)
    assert (first.restored, second.restored) == (0, first.prompt + 6 - 1)


def test_prompts_are_explained() -> None:
    more, half, other = explain.run().values()
    assert more.boundary == len(explain.READ) and half.boundary < half.tokens - 1 and other.boundary == 0
