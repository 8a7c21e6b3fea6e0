"""What a run is: the model, the phases, the optimizer's settings. Fixed at the start, saved, and obeyed on resuming."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from kda_jax import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """`steps` optimizer steps on `batch` windows of `length` tokens, `micro` windows at a time."""

    steps: int
    batch: int
    length: int
    micro: int

    def __post_init__(self) -> None:
        if min(self.steps, self.batch, self.length, self.micro) < 1 or self.batch % self.micro:
            raise ValueError(f"{self} needs positive sizes and a batch that micro={self.micro} divides")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that decides a run's numbers, besides the corpus.

    Rates are the peak learning rates of Muon (matrices) and AdamW (all else). `warmup` and `decay` are fractions of
    all steps: linear up from 0, constant, linear down to 0. `bias_rate` moves the routers' correction biases.
    """

    model: dict[str, Any]
    phases: tuple[Phase, ...]
    seed: int = 0
    muon_rate: float = 6e-3
    adam_rate: float = 6e-3
    weight_decay: float = 0.1
    warmup: float = 0.045
    decay: float = 0.55
    bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("a plan needs one phase or more")
        _config(self.model)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return sum(phase.steps for phase in self.phases)

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return _config(self.model)

    def rate(self, step: int) -> float:
        """The schedule's factor in [0, 1] for the step that follows `step` finished ones."""
        warmup, decay = max(self.warmup * self.steps, 1.0), max(self.decay * self.steps, 1.0)
        return max(min((step + 1) / warmup, (self.steps - step) / decay, 1.0), 0.0)

    def phase_of(self, step: int) -> tuple[int, int]:
        """The phase a step belongs to, and the step's place in it."""
        for index, phase in enumerate(self.phases):
            if step < phase.steps:
                return index, step
            step -= phase.steps
        raise ValueError(f"the run has {self.steps} steps, there is no step {self.steps + step}")

    def save(self, path: Path) -> None:
        """Writes the plan as json, whole or not at all."""
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file holds no plan.
        """
        try:
            fields = json.loads(path.read_text())
            return cls(**fields | {"phases": tuple(Phase(**phase) for phase in fields["phases"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no plan of a run ({error}); train into another folder") from error


def _config(fields: dict[str, Any]) -> ModelConfig:
    sizes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return ModelConfig(**sizes)


def model_fields() -> dict[str, Any]:
    """The trained model's sizes, as `ModelConfig` takes them."""
    return dataclasses.asdict(ModelConfig.tiny())


def phases(steps: int) -> tuple[Phase, ...]:
    """`steps` optimizer steps, the last twentieth of them on windows eight times as long.

    Small batches: a run of an hour sees its corpus once, and many small updates took it further than few large ones.
    The long windows teach what comes thousands of bytes after the start of a file; attention makes them dearer, so
    they come when the rate is small.
    """
    long = steps // 20
    short = Phase(steps=steps - long, batch=4, length=1024, micro=2)
    return (short, Phase(steps=long, batch=2, length=8192, micro=1)) if long else (short,)
