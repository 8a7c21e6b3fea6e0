"""Contestants in PyTorch: fla's plain forms of KDA, the ones its authors test their kernels against.

They are loaded from the wheel of `fla-core` by path: the package's `__init__` imports triton, which a machine
without a GPU need not have; the one file needs torch and einops only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestant import Absent, Arrays, Run
from benchmarks.inputs import Case, Inputs
from benchmarks.machine import num_cores

FILE = "fla/ops/kda/naive.py"


def load(function: str) -> tuple[Any, Callable[..., Any]]:
    """Load one function of fla's `naive.py` and PyTorch, set to use every core.

    Returns:
        The torch module and the function.

    Raises:
        Absent: torch, einops or fla-core is not installed, or its wheel has no such file or function.
    """
    try:
        import torch
    except ImportError as error:
        raise Absent("torch is not installed") from error
    torch.set_num_threads(num_cores())
    try:
        distribution = metadata.distribution("fla-core")
    except metadata.PackageNotFoundError as error:
        raise Absent("fla-core is not installed (pip install fla-core)") from error
    path = Path(str(distribution.locate_file(FILE)))
    spec = importlib.util.spec_from_file_location("fla_ops_kda_naive", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise Absent(f"fla-core {distribution.version} has no {FILE}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return torch, getattr(module, function)
    except (ImportError, AttributeError) as error:
        raise Absent(f"fla-core {distribution.version}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchContestant:
    """One function of fla's `naive.py`."""

    name: str
    function: str
    package: str = "fla-core"
    raw_gate: bool = False
    keeps_states: int = 0
    chunk: int | None = None

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        torch, operator = load(self.function)
        arguments = [torch.from_numpy(np.array(x)) for x in inputs[:6]]
        weights = [torch.from_numpy(np.array(x)) for x in (inputs.out_weight, inputs.state_weight)]
        leaves = [x.clone().requires_grad_() for x in arguments]

        def call(values: list[Any]) -> tuple[Any, Any]:
            if self.chunk is not None and case.T % self.chunk:
                raise ValueError(f"T={case.T} is not a multiple of its chunk, {self.chunk}")
            return operator(*values[:5], initial_state=values[5], output_final_state=True)

        def forward() -> Arrays:
            with torch.inference_mode():
                return call(arguments)

        def both() -> Arrays:
            out, state = call(leaves)
            loss = (out * weights[0]).sum() + (state * weights[1]).sum()
            return torch.autograd.grad(loss, leaves)

        def restore(arrays: Arrays) -> tuple[np.ndarray, ...]:
            return tuple(x.numpy() for x in arrays)

        return Run(forward=forward, both=both, restore_forward=restore, restore_both=restore)
