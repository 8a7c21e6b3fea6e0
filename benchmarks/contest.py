"""One case of the operator benchmark: who takes part, whether they agree with ours, how long they take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from benchmarks.contestant import GRADIENTS, Absent, Contestant, Run, quiet
from benchmarks.inputs import Case, draw
from benchmarks.machine import package_version
from benchmarks.timing import Contender, Timing, race, speedup
from benchmarks.work import kda_flops

Pass = Literal["forward", "both"]
Log = Callable[[str], None]
# rms(error) / rms(ours). Chunked float32 forms keep 1e-6 in outputs and 1e-5 in the gate's gradient.
TOLERANCE: dict[Pass, float] = {"forward": 2e-5, "both": 1e-4}
NAMES: dict[Pass, tuple[str, ...]] = {"forward": ("out", "state"), "both": GRADIENTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long to measure.

    Attributes:
        lengths: the sequence lengths of the prefill section.
        rounds: timed calls of a forward, forward+backward.
        budget_s: seconds that one contestant's timed calls may take in a race, forward and forward+backward;
            a slower one gets fewer rounds, at least `min_rounds`.
    """

    lengths: tuple[int, ...] = (2048, 8192)
    rounds: dict[Pass, int] = field(default_factory=lambda: {"forward": 21, "both": 9})
    budget_s: dict[Pass, float] = field(default_factory=lambda: {"forward": 10.0, "both": 15.0})
    min_rounds: int = 1  # of one that needs a minute a call
    quick: bool = False

    @classmethod
    def quickest(cls) -> Settings:
        """A look at whether everything runs: short sequences, three rounds."""
        return cls(
            lengths=(256,),
            rounds={"forward": 3, "both": 3},
            budget_s={"forward": 1.0, "both": 1.0},
            quick=True,
        )


@dataclass(slots=True)
class Outcome:
    """What a case gave: records of who was timed, reasons of who refused, names of who is not installed."""

    results: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def root_mean_square(array: np.ndarray) -> float:
    """An array's root mean square, summed in float64; nan or inf, without a warning, where it holds such."""
    with np.errstate(invalid="ignore"):
        return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def disagreement(
    names: tuple[str, ...], ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]
) -> dict[str, float]:
    """The error of each array against ours, rms(error) / rms(ours); nan where either is not finite."""
    errors = {}
    for name, reference, got in zip(names, ours, theirs, strict=True):
        scale = root_mean_square(reference)
        error = root_mean_square(got.astype(np.float64) - reference)
        finite = np.isfinite(got).all() and np.isfinite(reference).all()
        errors[name] = error / max(scale, 1e-30) if finite else float("nan")
    return errors


def verdict(errors: dict[str, float], tolerance: float) -> str | None:
    """What is not finite, or differs from ours by more than `tolerance`, as a reason; None when all agree."""
    broken = [name for name, error in errors.items() if not np.isfinite(error)]
    if broken:
        return f"not finite: {', '.join(broken)}"
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if error > tolerance]
    return f"differs from ours by more than {tolerance:.0e}: {', '.join(wrong)}" if wrong else None


def free_bytes() -> int:
    """Bytes of memory that are free now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def spare_memory(contestant: Contestant, case: Case) -> None:
    """Raise `MemoryError` when a backward that keeps every token's states would not fit into free memory."""
    needed = 4 * contestant.keeps_states * case.B * case.T * case.H * case.K * case.V
    if needed > 0.8 * (free := free_bytes()):
        needs = f"its backward keeps about {needed / 1e9:.1f} GB of states"
        raise MemoryError(f"{needs}; {free / 1e9:.1f} GB are free")


def reason(error: Exception) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines()
    text = lines[0][:200] if lines else "no message"
    return f"{type(error).__name__}: {text}"


class Contest:
    """Agreement and races of one case.

    Ours runs first, on the log decay; once a contestant that fuses the gate takes part, ours runs on the raw
    gate as well. Every peer's outputs and gradients are compared with those before a clock starts, at the
    very sizes that are timed.
    """

    def __init__(self, case: Case, settings: Settings, ours_with_gate: Contestant, log: Log) -> None:
        self.case, self.settings, self.log = case, settings, log
        self.ours_with_gate = ours_with_gate
        self.inputs = draw(case)
        self.runs: dict[str, Run] = {}
        self.contestants: dict[str, Contestant] = {}
        self.errors: dict[str, dict[Pass, dict[str, float]]] = {}
        self.baselines: dict[tuple[bool, Pass], tuple[np.ndarray, ...]] = {}
        self.outcome = Outcome()

    def refuse(self, contestant: Contestant, act: str, why: str) -> None:
        """Note that a contestant does not take part, and why."""
        note = {"impl": contestant.name, **self.case.sizes(), "pass": act, "reason": why}
        self.outcome.refused.append(note)

    def enter_ours(self, contestant: Contestant, passes: tuple[Pass, ...]) -> None:
        """Run ours; its outputs become what others are compared with.

        Raises:
            RuntimeError: ours is not finite: there is nothing to compare with.
        """
        self.log(contestant.name)
        run = contestant.prepare(self.case, self.inputs)
        for act in passes:
            arrays = restored(run, act)
            named = zip(NAMES[act], arrays, strict=True)
            broken = [name for name, array in named if not np.isfinite(array).all()]
            if broken:
                raise RuntimeError(f"ours gives values that are not finite in {broken} for {self.case}")
            self.baselines[contestant.raw_gate, act] = arrays
        self.runs[contestant.name], self.contestants[contestant.name] = run, contestant
        self.errors[contestant.name] = {act: {} for act in passes}

    def enter(self, contestant: Contestant, passes: tuple[Pass, ...]) -> None:
        """Run a peer and compare; it takes part in the passes in which it agrees."""
        self.log(contestant.name)
        agreed: dict[Pass, dict[str, float]] = {}
        try:
            with quiet():
                run = contestant.prepare(self.case, self.inputs)
        except Absent as error:
            self.outcome.absent[contestant.name] = str(error)
            return
        for act in passes:
            try:
                if act == "both":
                    spare_memory(contestant, self.case)
                with quiet():
                    theirs = restored(run, act)
            except Exception as error:  # Whatever another package raises is its reason not to take part.
                self.refuse(contestant, act, reason(error))
                break
            if (contestant.raw_gate, act) not in self.baselines:
                self.enter_ours(self.ours_with_gate, passes)
            errors = disagreement(NAMES[act], self.baselines[contestant.raw_gate, act], theirs)
            if (wrong := verdict(errors, TOLERANCE[act])) is not None:
                self.refuse(contestant, act, wrong)
                break
            agreed[act] = errors
        if agreed:
            self.runs[contestant.name], self.contestants[contestant.name] = run, contestant
            self.errors[contestant.name] = agreed

    def time(self, act: Pass) -> dict[str, Timing]:
        """Race everybody who agreed in this pass."""
        contenders = [
            Contender(name=name, call=lambda _, run=run: run.forward() if act == "forward" else run.both())
            for name, run in self.runs.items()
            if act in self.errors[name]
        ]
        with quiet():
            return race(
                contenders,
                rounds=self.settings.rounds[act],
                budget_s=self.settings.budget_s[act],
                min_rounds=self.settings.min_rounds,
                warm=True,
                on_call=lambda name: self.log(f"{act} {name}"),
            )

    def finish(self, passes: tuple[Pass, ...]) -> Outcome:
        """Race the passes and write the records, ours first."""
        timings = {act: self.time(act) for act in passes}
        for name, contestant in self.contestants.items():
            record: dict[str, Any] = {"impl": name, "package": contestant.package}
            record |= {"version": package_version(contestant.package)} | self.case.sizes()
            for act in passes:
                if name not in timings[act]:
                    record |= {f"{act}_ms": None}
                    continue
                timing = timings[act][name]
                record |= timing.figures(act) | {f"{act}_gflops": self.flops(act) / timing.min_ms / 1e6}
                if not name.startswith("ours"):
                    rival = "ours_with_gate" if contestant.raw_gate else "ours"
                    record[f"{act}_speedup_of_ours"] = speedup(timings[act]["ours"], timing)
                    if rival != "ours":
                        record[f"{act}_speedup_of_{rival}"] = speedup(timings[act][rival], timing)
                    record[f"{act}_errors"] = self.errors[name][act]
            self.outcome.results.append(record)
        return self.outcome

    def flops(self, act: Pass) -> float:
        """The operations one pass needs."""
        case = self.case
        return kda_flops(case.B * case.T, case.H, case.K, case.V, backward=act == "both")


def restored(run: Run, act: Pass) -> tuple[np.ndarray, ...]:
    """One pass's arrays in our layout; this first call also compiles."""
    return run.restore_forward(run.forward()) if act == "forward" else run.restore_both(run.both())


def hold(
    case: Case,
    settings: Settings,
    *,
    ours: Contestant,
    ours_with_gate: Contestant,
    peers: tuple[Contestant, ...],
    log: Log,
    passes: tuple[Pass, ...] = ("forward", "both"),
) -> Outcome:
    """Hold one contest: ours, the peers' agreement with it, the races.

    Args:
        case: sizes and gate.
        settings: rounds and budgets.
        ours, ours_with_gate: our operator on `g`, and with its gate before it.
        peers: who else may take part.
        log: told who is at work.
        passes: what to time.

    Raises:
        RuntimeError: ours gives values that are not finite.
    """
    contest = Contest(case, settings, ours_with_gate, log)
    contest.enter_ours(ours, passes)
    for peer in peers:
        contest.enter(peer, passes)
    return contest.finish(passes)
