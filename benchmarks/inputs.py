"""Inputs of the operator benchmarks: a case's arrays, drawn as a freshly initialised layer makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Gate = Literal["bounded", "unbounded"]
LOWER_BOUND = -5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call's sizes and its gate; letters as in the README."""

    gate: Gate
    T: int
    B: int = 1
    H: int = 4
    K: int = 128
    V: int = 128

    @property
    def lower_bound(self) -> float | None:
        """What the bounded gate promises (g >= -5); None for the unbounded one."""
        return LOWER_BOUND if self.gate == "bounded" else None

    def sizes(self) -> dict[str, object]:
        """The case as keys of a JSON record."""
        return {"gate": self.gate, "B": self.B, "T": self.T, "H": self.H, "K": self.K, "V": self.V}


class Inputs(NamedTuple):
    """Float32 arrays of one case: the operator's arguments, the raw gate that gives the same `g`, and the
    weights of the loss.

    The loss is `sum(out * out_weight) + sum(final_state * state_weight)`.
    """

    q: jax.Array  # [B, T, H, K], rows of length 1
    k: jax.Array  # [B, T, H, K], rows of length 1
    v: jax.Array  # [B, T, H, V]
    g: jax.Array  # [B, T, H, K] log decay, <= 0
    beta: jax.Array  # [B, T, H] in (0, 1)
    state: jax.Array  # [B, H, K, V]
    z: jax.Array  # [B, T, H, K] raw gate
    A_log: jax.Array  # [H]
    dt_bias: jax.Array  # [H, K]
    out_weight: jax.Array  # [B, T, H, V]
    state_weight: jax.Array  # [B, H, K, V]


def draw(case: Case, seed: int = 0) -> Inputs:
    """Draw a case's inputs.

    The unbounded gate has the usual initialisation, `exp(A_log)` uniform in [1, 16] and time steps
    log-uniform in [1e-3, 1e-1]; the bounded one has `A_log` 0 and no bias, so that its decays fill the whole
    range (-5, 0).
    """
    rng = np.random.default_rng(seed)
    rows, state_shape = (case.B, case.T, case.H), (case.B, case.H, case.K, case.V)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in normal(2, *rows, case.K))
    z = normal(*rows, case.K)
    if case.gate == "bounded":
        A_log, dt_bias = np.zeros(case.H), np.zeros((case.H, case.K))
        g = LOWER_BOUND / (1 + np.exp(-z.astype(np.float64)))
    else:
        A_log = np.log(rng.uniform(1, 16, case.H))
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (case.H, case.K)))
        dt_bias = np.log(np.expm1(step))
        g = -np.exp(A_log)[:, None] * np.logaddexp(0, z + dt_bias)
    arrays = dict(
        q=q,
        k=k,
        v=normal(*rows, case.V),
        g=g,
        beta=1 / (1 + np.exp(-normal(*rows))),
        state=0.1 * normal(*state_shape),
        z=z,
        A_log=A_log,
        dt_bias=dt_bias,
        out_weight=normal(*rows, case.V),
        state_weight=normal(*state_shape),
    )
    return Inputs(**{name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()})
