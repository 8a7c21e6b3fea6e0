"""What the operator benchmark needs to know of an implementation of KDA."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from benchmarks.inputs import Case, Inputs

GRADIENTS = ("q", "k", "v", "gate", "beta", "state")
Arrays = tuple[Any, ...]


class Absent(Exception):
    """A contender is not installed; the message says what is missing."""


class Run(NamedTuple):
    """One contender on one case, ready to be timed.

    `forward()` gives (out, state) and `both()` the gradients of the loss in the order of `GRADIENTS`; both
    block until the arrays are there. `restore_*` bring them into our layout as numpy arrays.
    """

    forward: Callable[[], Arrays]
    both: Callable[[], Arrays]
    restore_forward: Callable[[Arrays], tuple[np.ndarray, ...]]
    restore_both: Callable[[Arrays], tuple[np.ndarray, ...]]


class Contestant(Protocol):
    """What the operator benchmark needs to know of an implementation."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str: ...

    @property
    def raw_gate(self) -> bool:
        """It takes the raw gate and computes `g` itself; its gradient `gate` is that of the raw gate."""
        ...

    @property
    def keeps_states(self) -> int:
        """State-sized arrays that its backward keeps for every token (0: none)."""
        ...

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        """Get ready for a case; raises `Absent`."""
        ...


@contextmanager
def quiet() -> Iterator[None]:
    """Bear with other packages while they are imported, traced and run.

    Their warnings (no TPU here, no tuned tile sizes) are silenced, and they may mix dtypes as JAX lets them
    by default.
    """
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("ignore")
            yield
    finally:
        absl.setLevel(level)
