"""`bench model`: the 41 M parameter model against transformers on the same weights, in one run."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from benchmarks import machine, peak, report
from benchmarks.contest import Log, root_mean_square
from benchmarks.contestant import Absent, quiet
from benchmarks.model_contestants import CONTESTANTS, ModelContestant
from benchmarks.timing import Contender, Timing, race, speedup
from benchmarks.work import ModelWork
from kda_jax.config import ModelConfig
from kda_jax.model import Model

# Tokens a second of llama.cpp (October 2026, float32, no flash attention) over those of transformers (5.24,
# eager experts), this model, 2 cores, one run: what our ratio to transformers is divided by.
LLAMA_OVER_TRANSFORMERS = {
    ("prefill", 512, 1): 1090 / 293,
    ("prefill", 2048, 1): 1180 / 402,
    ("prefill", 8192, 1): 786 / 250,
    ("decode", 2048, 1): 119 / 25.6,
    ("decode", 2048, 4): 204 / 45.0,
}
NOTES = {
    "ms": "minimum; the median and the number of timed calls stand beside it; both as tokens a second",
    "prefill": "the last token's logits and the state, batch 1, random tokens",
    "decode": "`steps` greedy tokens a row behind a prompt of `tokens`, all rows together",
    "transformers": "float32, eager experts, default attention, as many threads as cores",
    "matmul_share": "operations by formula over time, as a share of the machine's rate in this run",
    "bandwidth_share": "bytes a step must move over time, a share of the machine's reading rate in this run",
    "memory": "MiB; each in a process of its own: the peak of resident memory during the call minus what was "
    "resident after imports and loading (above_weights: the first call, which compiles; again_above_weights: "
    "the second) or just before the call (again_above_before)",
    "llama_cpp_inferred": "not run here: our ratio to transformers (medians) over llama.cpp's ratio to it, "
    "which was measured in an earlier run on 2 cores",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure and for how long.

    Attributes:
        prefill: prompt lengths.
        context: tokens before the first decoded one; batches: rows decoded together.
        steps: decoded tokens of one timed call.
        memory: prompt length of the memory measurement.
        rounds: timed calls; who needs more than `budget_s` seconds for all of them gets fewer, at least 2.
        compared: tokens whose logits are compared before any clock starts.
    """

    prefill: tuple[int, ...] = (512, 2048, 8192)
    context: int = 2048
    batches: tuple[int, ...] = (1, 4)
    steps: int = 64
    memory: int = 8192
    rounds: int = 7
    budget_s: float = 30.0
    compared: int = 300

    @classmethod
    def quickest(cls) -> Settings:
        """A look at whether everything runs."""
        return cls(prefill=(64, 128), context=64, steps=4, memory=128, rounds=2, budget_s=1.0, compared=70)


def compare(contestants: list[ModelContestant], config: ModelConfig, settings: Settings) -> dict[str, float]:
    """Logits of one prompt: rms(theirs - ours) / rms(ours) of every other contestant.

    Raises:
        RuntimeError: a contestant's logits are off by more than 1e-4: the two do not run the same model.
    """
    tokens = draw_tokens(config, 1, settings.compared)
    ours, *others = (contestant.logits(tokens) for contestant in contestants)
    errors = {}
    for contestant, theirs in zip(contestants[1:], others, strict=True):
        error = root_mean_square(theirs - ours) / root_mean_square(ours)
        if not error <= 1e-4:
            raise RuntimeError(f"{contestant.name}'s logits differ from ours by {error:.1e}, relative")
        errors[contestant.name] = error
    return errors


def draw_tokens(config: ModelConfig, batch: int, count: int) -> np.ndarray:
    """Random token ids [batch, count]."""
    return np.random.default_rng(count).integers(0, config.vocab_size, (batch, count), dtype=np.int32)


def record(
    name: str, act: str, tokens: int, batch: int, work: int, timings: dict[str, Timing]
) -> dict[str, Any]:
    """One contestant's figures in one race; `work` is the number of tokens a call handles."""
    timing = timings[name]
    made: dict[str, Any] = {"impl": name, "act": act, "tokens": tokens, "batch": batch}
    made |= {"ms": timing.min_ms, "median_ms": timing.median_ms, "rounds": timing.rounds}
    made |= {
        "tokens_per_s": 1e3 * work / timing.min_ms,
        "tokens_per_s_median": 1e3 * work / timing.median_ms,
    }
    if name != "ours":
        made["speedup_of_ours"] = speedup(timings["ours"], timing)
    return made


def measure(
    contestants: list[ModelContestant], config: ModelConfig, settings: Settings, log: Log
) -> list[dict[str, Any]]:
    """Race prefill at every length and decode at every batch size; greedy tokens must agree."""

    def held(contenders: list[Contender], title: str, warm: bool = False) -> dict[str, Timing]:
        return race(
            contenders,
            rounds=settings.rounds,
            budget_s=settings.budget_s,
            warm=warm,
            on_call=lambda name: log(f"{title}: {name}"),
        )

    results = []
    for length in settings.prefill:
        tokens = draw_tokens(config, 1, length)
        contenders = [
            Contender(name=each.name, call=lambda _, each=each, tokens=tokens: each.prefill(tokens))
            for each in contestants
        ]
        timings = held(contenders, f"prefill {length}")
        results += [record(each.name, "prefill", length, 1, length, timings) for each in contestants]
    for batch in settings.batches:
        tokens = draw_tokens(config, batch, settings.context)
        log(f"decode batch {batch}: prompts")
        decodings = {each.name: each.decoding(tokens, settings.steps) for each in contestants}
        absorbed = {name: each.call(each.prepare()) for name, each in decodings.items()}
        contenders = [
            Contender(name=name, call=each.call, prepare=each.prepare) for name, each in decodings.items()
        ]
        timings = held(contenders, f"decode batch {batch}", warm=True)
        for name in decodings:
            made = record(name, "decode", settings.context, batch, batch * settings.steps, timings)
            made["same_tokens"] = float(np.mean(absorbed[name] == absorbed["ours"]))
            results.append(made)
    return results


def add_shares(results: list[dict[str, Any]], work: ModelWork, rates: dict[str, float], steps: int) -> None:
    """Add what share of the machine's rates each record reached."""
    for made in results:
        if made["act"] == "prefill":
            rate = work.prefill_flops(made["tokens"]) / made["ms"] / 1e6
            made |= {"gflops": rate, "matmul_share": rate / rates["matmul_gflops"]}
        else:
            moved = steps * work.decode_bytes(made["tokens"] + steps // 2, made["batch"])
            rate = moved / made["ms"] / 1e6
            made |= {"gb_s": rate, "bandwidth_share": rate / rates["read_gb_s"]}


def inferred(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over llama.cpp in tokens a second, inferred where transformers ran and the ratio is known."""
    found = []
    for made in results:
        key = (made["act"], made["tokens"], made["batch"])
        if made["impl"] == "transformers" and key in LLAMA_OVER_TRANSFORMERS:
            known = LLAMA_OVER_TRANSFORMERS[key]
            ratio = made["speedup_of_ours"]["median"] / known
            case = {"act": key[0], "tokens": key[1], "batch": key[2]}
            found.append({**case, "llama_cpp_over_transformers": known, "ours_over_llama_cpp": ratio})
    return found


def main(json: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Run `bench model`, print its tables and write the JSON report.

    Args:
        json: where to write the report; None writes none.
        quick: short prompts and two rounds: a look at whether everything runs, no figures to quote.

    Returns:
        The report, as written.

    Raises:
        RuntimeError: the logits of two contestants differ.
    """
    settings = Settings.quickest() if quick else Settings()
    size = {"size": 512, "read_mib": 64, "rounds": 3} if quick else {}
    return run(ModelConfig.bench_41m(), settings, json=json, machine_size=size)


def run(
    config: ModelConfig, settings: Settings, *, json: Path | None, machine_size: dict[str, int]
) -> dict[str, Any]:
    """`main` for any config; `machine_size` are the sizes that `machine.measure` takes."""
    from kda_jax.weights import save

    console = report.console()
    report.make_folders(json)
    absent: dict[str, str] = {}
    with report.progress(console) as log, tempfile.TemporaryDirectory() as folder, quiet():
        log("the machine's own rates")
        rates = machine.measure(**machine_size)
        log("weights")
        path = Path(folder) / "model"
        save(Model(config, rngs=nnx.Rngs(0)), path)
        contestants: list[ModelContestant] = []
        for name, load in CONTESTANTS.items():
            try:
                contestants.append(load(path))
            except Absent as error:
                absent[name] = str(error)
        log("logits")
        errors = compare(contestants, config, settings)
        results = measure(contestants, config, settings, log)
        memory = []
        for contestant in contestants:
            log(f"memory: {contestant.name}")
            memory.append(peak.run(contestant.name, path, settings.memory, config.vocab_size))
        log("the machine's own rates")
        rates = machine.best(rates, machine.measure(**machine_size))
    work = ModelWork.of(config)
    add_shares(results, work, rates, settings.steps)
    result = {
        "benchmark": "model",
        "machine": machine.describe() | rates,
        "settings": asdict(settings),
        "notes": NOTES,
        "logits_errors": errors,
        "results": results,
        "memory": memory,
        "llama_cpp_inferred": inferred(results),
        "absent": absent,
    }
    report.print_model(console, result)
    report.write(json, result)
    return result
