"""The demo's comparison: continuations that resume from checkpoints against runs that never stopped."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from kda_jax.commands.errors import CommandError
from kda_jax.forward import SplitModel, decode, dtype_of, prefill, split
from kda_jax.generate.loop import choose_first
from kda_jax.model import Model
from kda_jax.sampling import make_sampler
from kda_jax.state import ModelState, nbytes
from kda_jax.weights.load import load
from kda_jax.weights.statefile import load_state, save_state

GRID = 64  # resumed on it, a prefill has the bits of a cold one
SAMPLER = make_sampler(temperature=0.6, min_p=0.05)  # the likeliest token alone soon repeats itself
SEED = 0


class Fork(NamedTuple):
    """One continuation: the prompt's first `boundary` tokens, then `rest`, then what the model writes."""

    what: str
    boundary: int
    rest: list[int]


class Run(NamedTuple):
    """What a run computed: float32 logits [N, vocab], the tokens chosen from them, and the prefill's time."""

    logits: np.ndarray
    tokens: np.ndarray
    prefill_ms: float


class Row(NamedTuple):
    """A fork, both of its runs, the bytes of its checkpoint, and the process of the second run."""

    fork: Fork
    cold: Run
    resumed: Run
    checkpoint_nbytes: int
    where: str

    @property
    def identical(self) -> bool:
        """Whether every logit has the same bits in both runs."""
        cold, resumed = (run.logits.view(np.uint32) for run in (self.cold, self.resumed))
        return np.array_equal(cold, resumed) and np.array_equal(self.cold.tokens, self.resumed.tokens)


def compare(
    model: Model, folder: Path, prompt: list[int], forks: Sequence[Fork], new_tokens: int
) -> list[Row]:
    """Reads the prompt once, and runs every fork from its checkpoint and without a stop.

    A fork on the grid is held against one cold prefill of all its tokens; one off the grid against a run that
    made the same calls and kept its live state.

    Args:
        model: the model.
        folder: where it lies, for the second process.
        prompt: token ids; a checkpoint is kept at each fork's boundary.
        forks: the continuations; the last one resumes in a second process, through a file.
        new_tokens: tokens to decode in each.
    """
    parts = split(model)
    boundaries = sorted({fork.boundary for fork in forks})
    capacity = max(len(prompt), *(fork.boundary + len(fork.rest) for fork in forks)) + new_tokens
    states = prefill(parts, [prompt], boundaries=boundaries, last_only=True, capacity=capacity)[-1]
    checkpoints = dict(zip(boundaries, states))
    rows = []
    for fork in forks:
        start = prompt[: fork.boundary]
        calls = [start, fork.rest] if fork.boundary % GRID else [start + fork.rest]
        cold = run(parts, None, calls, new_tokens, capacity)
        if fork is forks[-1]:
            with tempfile.TemporaryDirectory() as temporary:
                saved = Path(temporary) / "state.safetensors"
                save_state(saved, checkpoints[fork.boundary], model)
                resumed, where = _run_elsewhere(folder, saved, fork.rest, new_tokens, capacity)
                size = saved.stat().st_size
        else:
            resumed = run(parts, checkpoints[fork.boundary], [fork.rest], new_tokens, capacity)
            size = nbytes(model.config, fork.boundary, dtype=dtype_of(parts[1]))
            where = "this"
        rows.append(Row(fork, cold, resumed, size, where))
    return rows


def run(
    model: SplitModel, state: ModelState | None, calls: Sequence[list[int]], new_tokens: int, capacity: int
) -> Run:
    """Reads tokens in these calls, then draws from `SEED`. The prefill's time is the best of two, compiled."""

    def read() -> tuple[np.ndarray, ModelState]:
        logits, now = None, state
        for call in calls:
            logits, now = prefill(model, [call], now, last_only=True, capacity=capacity)
        assert logits is not None and now is not None
        return np.asarray(logits)[:, -1], now

    row, live = read()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        row, live = read()
        times.append(1e3 * (time.perf_counter() - start))
    key = jax.random.key(SEED)

    def choose(row: np.ndarray) -> int:
        return int(choose_first(jnp.asarray(row), live.position, None, key, SAMPLER)[0])

    logits, tokens = [row], [choose(row)]
    for _ in range(new_tokens - 1):
        row, live = decode(model, [tokens[-1]], live)
        logits.append(np.asarray(row))
        tokens.append(choose(logits[-1]))
    return Run(np.concatenate(logits), np.asarray(tokens, np.int32), min(times))


def _run_elsewhere(
    folder: Path, state: Path, rest: list[int], new_tokens: int, capacity: int
) -> tuple[Run, str]:
    result = state.with_name("run.safetensors")
    command = [
        sys.executable,
        "-m",
        "kda_jax",
        "demo-resume",
        folder,
        state,
        result,
        ",".join(map(str, rest)),
    ]
    process = subprocess.Popen(
        [*map(str, command), str(new_tokens), str(capacity)], stderr=subprocess.PIPE, text=True
    )
    _, complaint = process.communicate()
    if process.returncode:
        raise CommandError(f"the second process ended with {process.returncode}: {complaint.strip()[-500:]}")
    found = load_file(result)
    return Run(found["logits"], found["tokens"], float(found["prefill_ms"][0])), str(process.pid)


def resume(folder: Path, state: Path, result: Path, rest: list[int], new_tokens: int, capacity: int) -> None:
    """The second process: goes on from the state in a file, and leaves what it computed in another."""
    model = load(folder, dtype="float32")
    found = run(split(model), load_state(state, model), [rest], new_tokens, capacity)
    milliseconds = np.asarray([found.prefill_ms], np.float64)
    save_file({"logits": found.logits, "tokens": found.tokens, "prefill_ms": milliseconds}, result)
