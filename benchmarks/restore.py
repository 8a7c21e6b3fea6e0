"""From how many tokens on a checkpoint from a store beats computing the prompt again, with the example's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import report
from benchmarks.timing import Contender, race
from cache import Namespace
from kda_jax.engine import Shared
from kda_jax.forward import SplitModel, prefill, split
from kda_jax.weights.load import load
from transfer import Objects

MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny"
LENGTHS = (64, 128, 256, 512, 1024, 2048)
NOTES = {
    "restore": "examples/tiny in float32; tokens computed with one prefill, against a search by the tokens, all reads, "
    "comparisons of digests, and the state in JAX's memory; both then go on with the same token",
}


def measure(stores: Mapping[str, Objects], quick: bool, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """One record a length: milliseconds of computing the tokens, and of restoring them from each store."""
    model = split(load(MODEL, dtype="float32"))
    namespace = Namespace(weights=b"the example's", tokenizer=b"its").digest()
    shared = {name: Shared(objects, namespace) for name, objects in stores.items()}
    rng, records = np.random.default_rng(0), []
    for length in LENGTHS[:2] if quick else LENGTHS:
        tokens = rng.integers(0, 256, length + 1, np.int32)  # another prompt each time
        _, end = prefill(model, tokens[None, :length], last_only=True)[:2]
        for name, each in shared.items():
            if each.publish(tokens[:length], {length: end}) != [length]:
                raise RuntimeError(f"{name} did not take the checkpoint: {stores[name].counters()}")
        contenders = [Contender(name="compute", call=lambda _, tokens=tokens: _compute(model, tokens))]
        contenders += [
            Contender(name=name, call=lambda _, each=each, tokens=tokens: _restore(each, tokens))
            for name, each in shared.items()
        ]
        timings = race(
            contenders,
            rounds=3 if quick else 15,
            budget_s=10.0,
            on_call=lambda name, length=length: log(f"restore {length} tokens: {name}"),
        )
        records.append(
            {"tokens": length} | {f"{name}_ms": timing.median_ms for name, timing in timings.items()}
        )
    return records


def _compute(model: SplitModel, tokens: np.ndarray) -> None:
    jax.block_until_ready(prefill(model, tokens[None, :-1], last_only=True))


def _restore(shared: Shared, tokens: np.ndarray) -> None:
    boundary, state, found = shared.resume(tokens)
    if boundary != len(tokens) - 1:
        raise RuntimeError(f"resumed at {boundary} of {len(tokens) - 1} tokens: {found}")
    jax.block_until_ready(state)


def wins(records: list[dict[str, Any]], store: str) -> int | None:
    """The least number of tokens from which on restoring from a store was faster at every length; None for never."""
    least = None
    for record in reversed(records):
        if record[f"{store}_ms"] >= record["compute_ms"]:
            break
        least = record["tokens"]
    return least


def show(console: Any, records: list[dict[str, Any]]) -> None:
    """One row a length."""
    stores = [key.removesuffix("_ms") for key in records[0] if key.endswith("_ms") and key != "compute_ms"]
    rows = [
        (str(record["tokens"]), *(report.number(record[f"{name}_ms"]) for name in ("compute", *stores)))
        for record in records
    ]
    console.print(
        report.table("Compute a prompt, or restore it (ms, median)", ("tokens", "compute", *stores), rows)
    )
    for store in stores:
        least = wins(records, store)
        won = "at no length here" if least is None else f"from {least} tokens on"
        console.print(f"restoring from {store} is faster {won}", highlight=False)
