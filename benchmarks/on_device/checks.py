"""Which kernels are checked on a device, and on what: hard gates, layouts, both dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.on_device.judge import Check
from pallas_kernels import kda_prefill, kda_step

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
FINE, HARD = 5e-6, 2e-5
"""Bounds in float32; the second where a reset forgets almost everything."""
HALF, HALF_EQUAL = 3e-3, 2e-2
"""Bounds in bfloat16; the second with equal keys and beta 1, where the inverse has entries of 1 everywhere."""


def checks(*, little: bool) -> Iterator[Check]:
    """All checks; `little` ones are for bodies that run step by step."""
    sizes = (70, 32, 24) if little else (300, 128, 128)
    for dtype in DTYPES:
        yield from _prefills(*sizes, dtype)
        yield from _gradients(*sizes, dtype)
        yield from _steps(*sizes[1:], dtype)


def _prefills(tokens: int, keys: int, values: int, dtype: jnp.dtype) -> Iterator[Check]:
    half = dtype == jnp.bfloat16
    for gate in ("softplus", "bounded", "reset", "equal keys"):
        bound = HALF if half else HARD if gate == "reset" else FINE
        bound = HALF_EQUAL if half and gate == "equal keys" else bound
        yield Check(f"kda_prefill, {gate}", _prefill, _sequence(tokens, keys, values, gate, dtype), bound)
    odd = (tokens, keys - keys // 4, values - values // 8)
    yield Check(
        "kda_prefill, odd sizes", _prefill, _sequence(*odd, "softplus", dtype), HALF if half else FINE
    )
    packed = _sequence(tokens, keys, values, "softplus", dtype, states=5)
    cuts = np.array([0, 1, 1, 2, tokens // 2, tokens - 3], np.int32)
    yield Check("kda_prefill, packed", _pack, (*packed, cuts), HALF if half else FINE)
    resumed = (*_sequence(tokens, keys, values, "softplus", dtype), np.array([37], np.int32))
    at = np.array([0, 16, 27, 50, tokens], np.int32)
    yield Check("kda_prefill, resumed, boundaries", _resume, (*resumed, at), HALF if half else FINE)


def _gradients(tokens: int, keys: int, values: int, dtype: jnp.dtype) -> Iterator[Check]:
    for gate in ("softplus", "bounded"):
        arrays = _sequence(tokens, keys, values, gate, dtype)
        weights = np.random.default_rng(1).standard_normal(arrays[2].shape).astype(dtype)
        bound = 2e-2 if dtype == jnp.bfloat16 else 1e-4
        yield Check(f"kda_prefill's gradients, {gate}", _gradient, (*arrays, weights), bound)


def _steps(keys: int, values: int, dtype: jnp.dtype) -> Iterator[Check]:
    *rows, state = _sequence(5, keys, values, "softplus", dtype, states=9)
    slots = np.array([7, -1, 0, 3, 8], np.int32)
    bound = HALF if dtype == jnp.bfloat16 else FINE
    yield Check("kda_step, slots", _step, (*(x[0] for x in rows), state, slots), bound)


def _prefill(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, *, implementation: str) -> Any:
    return kda_prefill(q, k, v, g, beta, state, qk_l2norm=True, implementation=implementation)


def _pack(q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, cuts: Any, *, implementation: str) -> Any:
    return kda_prefill(
        q, k, v, g, beta, states, cu_seqlens=cuts, qk_l2norm=True, implementation=implementation
    )


def _resume(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, start: Any, at: Any, *, implementation: str
) -> Any:
    return kda_prefill(
        q, k, v, g, beta, state, start=start, boundaries=at, qk_l2norm=True, implementation=implementation
    )


def _gradient(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, weights: Any, *, implementation: str
) -> Any:
    def forward(*x: Any) -> tuple[jax.Array, jax.Array]:
        out, final = _prefill(*x, implementation=implementation)
        return out, final

    (out, final), transpose = jax.vjp(forward, q, k, v, g, beta, state)
    return transpose((weights.astype(out.dtype), jnp.ones_like(final)))


def _step(q: Any, k: Any, v: Any, g: Any, beta: Any, pool: Any, slots: Any, *, implementation: str) -> Any:
    return kda_step(q, k, v, g, beta, pool, slots=slots, qk_l2norm=True, implementation=implementation)


def _sequence(
    tokens: int, keys: int, values: int, gate: str, dtype: jnp.dtype, states: int = 1
) -> tuple[np.ndarray, ...]:
    """q, k, v in a dtype, g and beta in float32, and float32 states: two heads of a batch of one."""
    random = np.random.default_rng(0)
    normal = random.standard_normal
    rows = (1, tokens, 2)
    q, k = normal((2, *rows, keys))
    v, z, write = normal((*rows, values)), normal((*rows, keys)), normal(rows)
    g, beta = -random.uniform(1, 16, (2, 1)) * np.log1p(np.exp(z)), 1 / (1 + np.exp(-write))
    if gate == "bounded":
        g = -5 / (1 + np.exp(-2 * z))
    elif gate == "reset":
        g = -0.1 * np.abs(z)
        g[:, tokens // 2] = -1000.0
    elif gate == "equal keys":
        k, g, beta = np.broadcast_to(k[:, :1], k.shape), np.full_like(z, -1e-3), np.ones_like(beta)
    state = 0.1 * normal((states, 2, keys, values))
    return (
        *(x.astype(np.float32).astype(dtype) for x in (q, k, v)),
        *(x.astype(np.float32) for x in (g, beta, state)),
    )
