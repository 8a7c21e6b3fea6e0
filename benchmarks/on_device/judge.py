"""Kernels against float64: every check runs one operator on the device, and its definition in float64 beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contest import disagreement, reason


class Check(NamedTuple):
    """One operator on one set of inputs.

    Attributes:
        name: operator and inputs, for the reader.
        function: arrays and `implementation=` to a pytree of arrays.
        arrays: the inputs; floating ones are float32 or bfloat16.
        bound: of rms(error) / rms(float64), in every result.
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    bound: float


def judge(check: Check, implementation: str) -> dict[str, Any]:
    """Runs a check.

    Args:
        check: what to run.
        implementation: whom to run it with.

    Returns:
        A record: `name`, `dtype`, the largest `error` of its results and their `bound`, and `wrong`: None, or what
        does not hold.
    """
    record: dict[str, Any] = {
        "name": check.name,
        "dtype": str(next(x.dtype for x in check.arrays if jnp.issubdtype(x.dtype, jnp.floating))),
        "error": None,
        "bound": check.bound,
        "wrong": None,
    }
    try:
        run = jax.jit(lambda *x: check.function(*x, implementation=implementation))
        got = jax.tree.leaves(jax.device_get(run(*check.arrays)))
        want = jax.tree.leaves(_in_float64(check))
    except Exception as error:  # whatever a device or compiler raises is the finding
        return record | {"wrong": reason(error)}
    names = tuple(f"result {i}" for i in range(len(want)))
    errors = disagreement(names, tuple(map(np.asarray, want)), tuple(map(np.asarray, got)))
    worst = max(errors.values(), key=lambda error: np.inf if np.isnan(error) else error)
    record["error"] = worst
    if not worst < check.bound:
        record["wrong"] = f"differs from float64 by {worst:.1e}, {check.bound:.1e} is allowed"
    return record


def judge_all(
    checks: Iterable[Check], implementation: str, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every check's record."""
    records = []
    for check in checks:
        log(f"right? {check.name}")
        records.append(judge(check, implementation))
    return records


def _in_float64(check: Check) -> Any:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [
            jnp.asarray(x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x)
            for x in check.arrays
        ]
        run = jax.jit(lambda *x: check.function(*x, implementation="reference"))
        return jax.device_get(run(*wide))
