"""Trains the tiny byte-level hybrid of this folder on the Python standard library's own sources, on a CPU.

    python examples/train_tiny.py --minutes 60 --out out/tiny

Stop it at any time and give the same command again: it goes on from the last checkpoint with the plan it made at its
start. When the plan is done it stores the weights (Hugging Face layout, float16), measures the stored weights on files
that were held out, and draws the loss curve.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import kda_jax
from tiny_lm import corpus, measure
from tiny_lm.plan import Plan, model_fields, phases
from tiny_lm.plot import save_curve
from tiny_lm.store import store_model
from tiny_lm.train import Run, read_losses


def main(
    out: Annotated[
        Path, typer.Option(help="folder of the run: plan, checkpoints, losses, and at the end the model")
    ],
    minutes: Annotated[
        float, typer.Option(help="training time to plan for, by steps measured at the start")
    ] = 60.0,
    steps: Annotated[int | None, typer.Option(help="optimizer steps, instead of --minutes")] = None,
    seed: Annotated[
        int, typer.Option(help="decides the initial weights, the order of the data and the split")
    ] = 0,
    source: Annotated[Path | None, typer.Option(help="train on another folder of .py files")] = None,
) -> None:
    """Trains a tiny Kimi Linear model on Python sources, or goes on where a run in OUT stopped."""
    try:
        train(out, minutes=minutes, steps=steps, seed=seed, source=source)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"train_tiny: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


def train(out: Path, *, minutes: float, steps: int | None, seed: int, source: Path | None) -> None:
    """Makes or resumes the run in `out`, finishes it, and measures what it made."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plan.json"
    plan = Plan.load(path) if path.exists() else None
    # A resumed run keeps its split: under another seed it would be measured on files it was trained on.
    split = corpus.split_sources(corpus.find_sources(source), seed=seed if plan is None else plan.seed)
    print(f"{_size(split.train)} to train on, {_size(split.held_out)} held out")
    if plan is None:
        plan = _plan(steps, minutes, seed, split.train)
        plan.save(path)
    run = Run(plan, out, split.train)
    tokens = sum(phase.steps * phase.batch * phase.length for phase in plan.phases)
    print(f"{run.trainee.num_parameters:,} parameters, {plan.steps} steps, {tokens / 1e6:.1f} MB of text")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=plan.steps, completed=int(run.state.step))
        for done in run:
            bar.update(task, completed=done.step, description=f"{done.bits:.3f} bits per byte")
    _finish(out, run, split)


def _plan(steps: int | None, minutes: float, seed: int, sources: tuple[corpus.Source, ...]) -> Plan:
    if steps is None:
        print("measuring a step of each kind (compiles first)")
        # Enough steps for every phase to have one, in its share of the whole.
        trial = Plan(model=model_fields(), phases=phases(1000), seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            run = Run(trial, Path(folder), sources)
            seconds = [run.seconds_per_step(index) for index in range(len(trial.phases))]
        share = [phase.steps / trial.steps for phase in trial.phases]
        mean = sum(each * part for each, part in zip(seconds, share))
        steps = int(60 * minutes / mean)
        print(
            f"{', '.join(f'{each:.2f} s' for each in seconds)} a step: {steps} steps in {minutes:g} minutes"
        )
    return Plan(model=model_fields(), phases=phases(steps), seed=seed)


def _finish(out: Path, run: Run, split: corpus.Split) -> None:
    folder = out / "model"
    store_model(run.model(), folder)
    model = kda_jax.load(folder, dtype=jnp.float32)
    files = []
    with Progress() as bar:
        for source in bar.track(split.held_out, description="measuring the stored weights"):
            files.append(measure.file_bits(model, source))
    log = read_losses(out / "losses.csv")
    found, bars = measure.summary(files), measure.compressed(split.held_out)
    metrics = {
        "bits_per_byte": found["bits_per_byte"],
        "compressors_bits_per_byte": bars,
        "held_out": {key: value for key, value in found.items() if key != "bits_per_byte"},
        "training": {
            "steps": run.plan.steps,
            "tokens": sum(phase.steps * phase.batch * phase.length for phase in run.plan.phases),
            "seconds": round(sum(done.seconds for done in log), 1),
            "core_seconds": round(sum(done.core_seconds for done in log), 1),
            "cores": os.cpu_count(),
            "parameters": run.trainee.num_parameters,
            "seed": run.plan.seed,
            "files": len(split.train),
            "bytes": sum(len(each.data) for each in split.train),
            "corpus_sha256": corpus.digest((*split.train, *split.held_out)),
            "python": platform.python_version(),
        },
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    lines = {name: each["concatenated"] for name, each in bars.items()}
    save_curve(
        folder / "loss.png", [done.step for done in log], [done.bits for done in log], bars=lines,
        model=found["bits_per_byte"],
    )  # fmt: skip
    print(f"held-out, bits per byte: this model {found['bits_per_byte']:.4f}")
    for name, each in bars.items():
        print(
            f"  {name}: {each['concatenated']:.4f} over all files in one stream, {each['per_file']:.4f} file by file"
        )
    print(f"stored in {folder}")


def _size(sources: tuple[corpus.Source, ...]) -> str:
    return f"{len(sources)} files ({sum(len(source.data) for source in sources) / 1e6:.2f} MB)"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    typer.run(main)
