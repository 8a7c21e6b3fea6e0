"""KDA's backward kernels against float64 autodiff of the definition: sizes, chunks, halves, and what lies around."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pallas_kernels_kda import QUICK, inputs

from measure import assert_close
from pallas_kernels import kda_prefill

NAMES = ("q", "k", "v", "g", "beta", "state")


@functools.cache
def gradients(implementation: str, chunk: int | None = None, cu: tuple[int, ...] | None = None):
    """A program of the arrays and of the weights of outputs and final states, for the gradients of all arrays."""
    options: dict[str, Any] = dict(implementation=implementation, chunk_size=chunk, cu_seqlens=cu)

    def pull(arrays, weights):
        results, back = jax.vjp(lambda *x: kda_prefill(*x, **options), *arrays)
        return back(tuple(w.astype(y.dtype) for w, y in zip(weights, results, strict=True)))

    return jax.jit(pull, compiler_options=QUICK)


def weights_for(arrays: Sequence[Any], seed: int = 9) -> list[Any]:
    """Of the output and the final state."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(arrays[i].shape).astype(np.float32) for i in (2, 5)]


def exact(arrays: Sequence[Any], weights: Sequence[Any], cu: tuple[int, ...] | None = None):
    """The definition's gradients in float64."""
    with jax.enable_x64(True):
        wide = ([np.asarray(x, np.float64) for x in part] for part in (arrays, weights))
        return jax.tree.map(np.asarray, gradients("reference", None, cu)(*wide))


def assert_gradients(want: Sequence[Any], got: Sequence[Any], bound: float, of_g: float) -> None:
    for name, a, b in zip(NAMES, want, got, strict=True):
        assert np.isfinite(np.asarray(b, np.float32)).all(), name
        assert_close(f"d{name}", a, b, of_g if name == "g" else bound)


@pytest.mark.parametrize("keys, values, chunk", [(20, 7, 16), (40, 72, 32)])
def test_any_size_and_chunk(keys, values, chunk):
    arrays = inputs("softplus", tokens=70, keys=keys, values=values, seed=4)
    got = gradients("triton-interpret", chunk)(arrays, weights_for(arrays))
    assert_gradients(exact(arrays, weights_for(arrays)), got, 2e-5, 1e-4)


@pytest.mark.parametrize("case", ["saturated", "half_forgets", "-inf"])
def test_decays_that_leave_nothing(case):
    """Chunks in which decays underflow: with differences of sums, what is left of them would be noise."""
    arrays = list(inputs("reset", tokens=150, seed=5))
    g = arrays[3]
    match case:
        case "saturated":
            g[:] = -5.0
        case "half_forgets":
            g[..., ::2], g[..., 1::2] = 0.0, -30.0
        case "-inf":
            g[:, [7, 64, 65, 140]] = -np.inf
    got = gradients("triton-interpret")(arrays, weights_for(arrays))
    assert_gradients(exact(arrays, weights_for(arrays)), got, 2e-5, 1e-4)
    if case == "-inf":
        size = np.abs(np.asarray(got[3])).max()
        assert np.abs(np.asarray(got[3])[:, [7, 64, 65, 140]]).max() < 1e-5 * size


@pytest.mark.parametrize("gate, bound", [("softplus", 3e-3), ("bounded", 3e-3), ("equal_keys", 2e-2)])
@pytest.mark.parametrize("keys", [32, 96], ids=["held", "stored"])
def test_half_inputs_cost_what_halves_cost(keys, gate, bound):
    arrays = inputs(gate, tokens=200 if keys == 32 else 100, keys=keys, values=64)
    half = [*(jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]), *arrays[3:]]
    weights = weights_for(arrays)
    weights[0] = jnp.asarray(weights[0], jnp.bfloat16)
    got = gradients("triton-interpret")(half, weights)
    assert [x.dtype for x in got] == [jnp.bfloat16] * 3 + [jnp.float32] * 3
    assert_gradients(exact(half, weights), got, bound, bound)


def test_what_lies_around_reaches_no_gradient():
    """Behind the last sequence all is NaN or huge, the output's gradient too: gradients there are zeros."""
    cu = (0, 0, 1, 34, 35, 100)
    arrays = inputs("bounded", tokens=110, states=5)
    weights = weights_for(arrays)
    want = exact(arrays, [np.where(np.arange(110)[:, None, None] < 100, weights[0], 0), weights[1]], cu)
    run = gradients("triton-interpret", None, cu)
    fills = (np.nan, 1e30, np.nan, np.nan, 1e30, np.nan)
    for x, fill in zip((*arrays[:5], weights[0]), fills, strict=True):
        x[:, 100:] = fill
    got = run(arrays, weights)
    assert_gradients(want, got, 2e-5, 1e-4)
    for name, x in zip(NAMES[:5], got, strict=False):
        np.testing.assert_array_equal(np.asarray(x)[:, 100:], 0, err_msg=name)
