"""The demo's comparison: continuations that resume from checkpoints against runs that never stopped."""

from __future__ import annotations

import json
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

from cache import Namespace
from kda_jax.commands.errors import CommandError
from kda_jax.commands.stores import open_store, own_store
from kda_jax.engine.shared import Shared
from kda_jax.forward import SplitModel, decode, dtype_of, prefill, split
from kda_jax.generate.loop import choose_first
from kda_jax.model import Model
from kda_jax.sampling import make_sampler
from kda_jax.state import ModelState, nbytes
from kda_jax.weights.digest import TOKENIZER, WEIGHTS, folder_digest
from kda_jax.weights.load import load

GRID = 64  # resumed on it, a prefill has the bits of a cold one
SAMPLER = make_sampler(temperature=0.6, min_p=0.05)  # the likeliest token alone soon repeats itself
SEED = 0
STORE_NBYTES = 256 << 20


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
    model: Model, folder: Path, prompt: list[int], forks: Sequence[Fork], new_tokens: int, store: str
) -> list[Row]:
    """Reads the prompt once, and runs every fork from its checkpoint and without a stop.

    A fork on the grid is held against one cold prefill of all its tokens; one off the grid against a run that
    made the same calls and kept its live state.

    Args:
        model: the model.
        folder: where it lies, for the second process.
        prompt: token ids; a checkpoint is kept at each fork's boundary.
        forks: the continuations; the last one resumes in a second process, from a store of objects.
        new_tokens: tokens to decode in each.
        store: the kind of that store, `disk` or `mooncake`.
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
        size = nbytes(model.config, fork.boundary, dtype=dtype_of(parts[1]))
        if fork is forks[-1]:
            resumed, where = _run_elsewhere(
                store, folder, start, checkpoints[fork.boundary], fork.rest, new_tokens, capacity
            )
        else:
            resumed = run(parts, checkpoints[fork.boundary], [fork.rest], new_tokens, capacity)
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
    store: str, folder: Path, start: list[int], state: ModelState, rest: list[int], new_tokens: int, capacity: int
) -> tuple[Run, str]:  # fmt: skip
    """Leaves a checkpoint in a store, and lets a second process find it there by its tokens and go on from it."""
    with tempfile.TemporaryDirectory() as temporary, own_store(store, Path(temporary), STORE_NBYTES) as spec:
        with open_store(spec) as objects:
            if Shared(objects, namespace(folder)).publish(start, {len(start): state}) != [len(start)]:
                raise CommandError(f"the store {spec} did not take the checkpoint: {objects.counters()}")
        task, result = Path(temporary) / "task.json", Path(temporary) / "run.safetensors"
        task.write_text(
            json.dumps(
                {
                    "folder": str(folder),
                    "store": spec,
                    "tokens": start + rest,
                    "new_tokens": new_tokens,
                    "capacity": capacity,
                }
            )
        )
        command = [sys.executable, "-m", "kda_jax", "demo-resume", str(task), str(result)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        _, complaint = process.communicate()
        if process.returncode:
            raise CommandError(
                f"the second process ended with {process.returncode}: {complaint.strip()[-500:]}"
            )
        found = load_file(result)
    if int(found["boundary"][0]) != len(start):
        raise CommandError(f"the second process resumed at {found['boundary'][0]}, not at {len(start)}")
    return Run(found["logits"], found["tokens"], float(found["prefill_ms"][0])), str(process.pid)


def resume(task: Path, result: Path) -> None:
    """The second process: finds the checkpoint of its tokens, goes on, and leaves what it computed in a file."""
    given = json.loads(task.read_text())
    folder, tokens = Path(given["folder"]), given["tokens"]
    model = load(folder, dtype="float32")
    with open_store(given["store"]) as objects:
        boundary, state, _ = Shared(objects, namespace(folder)).resume(tokens)
    found = run(split(model), state, [tokens[boundary:]], given["new_tokens"], given["capacity"])
    save_file(
        {
            "logits": found.logits,
            "tokens": found.tokens,
            "prefill_ms": np.asarray([found.prefill_ms], np.float64),
            "boundary": np.asarray([boundary], np.int64),
        },
        result,
    )


def namespace(folder: Path) -> bytes:
    """What the demo's two processes must agree on: the weights, the tokenizer, and float32 states."""
    weights, tokenizer = (folder_digest(folder, patterns) for patterns in (WEIGHTS, TOKENIZER))
    return Namespace(weights=weights, tokenizer=tokenizer).digest()
