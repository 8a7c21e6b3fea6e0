"""The TPU kernels as a TPU's memory would treat them: blocks come and go with the grid, what nobody wrote is NaN."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from measure import assert_close
from pallas_kernels import kda_prefill, kda_step
from pallas_kernels.kda.tpu.step import KEEP, LIVE, PADDING, plan


@pytest.fixture
def tpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run against an emulated TPU's memory, whatever their backend says."""
    call = pl.pallas_call

    def emulated(*arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options | {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")})

    monkeypatch.setattr(pl, "pallas_call", emulated)


def sequence(tokens: int, states: int, keys: int = 16, values: int = 24) -> list[np.ndarray]:
    """q, k, v, g, beta and states of two heads."""
    normal = np.random.default_rng(tokens).standard_normal
    q, k = normal((2, 1, tokens, 2, keys))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, g = normal((1, tokens, 2, values)), -np.abs(normal((1, tokens, 2, keys)))
    beta, state = 1 / (1 + np.exp(-normal((1, tokens, 2)))), normal((states, 2, keys, values))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, state)]


CU_SEQLENS = [0, 1, 1, 2, 67, 67]


def pull(implementation: str, *x: jax.Array) -> Any:
    """Outputs of a pack with padding behind it, and the gradients for given ones of them."""
    *arguments, d_out, d_final = x
    run = functools.partial(kda_prefill, cu_seqlens=CU_SEQLENS, implementation=implementation)
    results, pull = jax.vjp(run, *arguments)
    return results, pull((d_out, d_final))


def test_a_pack_and_its_gradient_read_nothing_that_nobody_wrote(tpu_memory: None) -> None:
    arguments = sequence(75, len(CU_SEQLENS) - 1)
    cotangents = [np.random.default_rng(1).standard_normal(arguments[i].shape) for i in (2, 5)]
    arguments += [x.astype(np.float32) for x in cotangents]
    want = jax.jit(functools.partial(pull, "reference"))(*arguments)
    poisoned = [x.copy() for x in arguments]
    for i in (*range(5), 6):
        poisoned[i][:, CU_SEQLENS[-1] :] = np.nan
    (out, final), d = jax.jit(functools.partial(pull, "tpu-interpret"))(*poisoned)
    for name, a, b in zip(("out", "final"), want[0], (out, final), strict=True):
        assert_close(name, a, b, 5e-6)
    for name, a, b in zip(("q", "k", "v", "g", "beta", "state"), want[1], d, strict=True):
        assert_close(f"d{name}", a, b, 1e-4 if name == "g" else 2e-5)
    for x in (out, *d[:5]):
        np.testing.assert_array_equal(x[:, CU_SEQLENS[-1] :], 0)


def test_gradients_of_halves_are_halves() -> None:
    arguments = [jnp.asarray(x) for x in sequence(20, 1)]
    half = [x.astype(jnp.bfloat16) for x in arguments[:3]] + arguments[3:]

    def loss(*x: jax.Array, implementation: str) -> jax.Array:
        out, final = kda_prefill(*x, implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(final * final)

    gradient = jax.grad(loss, argnums=range(6))
    got = gradient(*half, implementation="tpu-interpret")
    want = gradient(*(x.astype(jnp.float32) for x in half), implementation="reference")
    for name, x, a, b in zip(("q", "k", "v", "g", "beta", "state"), half, want, got, strict=True):
        assert b.dtype == x.dtype, name
        assert_close(f"d{name}", a, b, 5e-3)


def test_boundaries_read_nothing_that_nobody_wrote(tpu_memory: None) -> None:
    arguments = sequence(75, 1)
    asked = [0, 64, 70, 3]
    got = kda_prefill(*arguments, boundaries=asked, implementation="tpu-interpret")
    want = kda_prefill(*arguments, boundaries=asked, implementation="reference")
    for name, a, b in zip(("out", "final", "states"), want, got, strict=True):
        assert_close(name, a, b, 5e-6)


@pytest.mark.parametrize(
    "slots, place, kind",
    [
        ([4, -1, 0], [4, 4, 0], [LIVE, PADDING, LIVE]),
        ([-1, -1, 2], [2, 2, 2], [PADDING, PADDING, LIVE]),
        ([-3, 1, -1], [1, 1, 1], [PADDING, LIVE, PADDING]),
        ([-1, -1, -1], [0, 0, 0], [KEEP, PADDING, PADDING]),
        ([5, 2, 3], [5, 2, 3], [LIVE, LIVE, LIVE]),
    ],
    ids=["between", "first", "around", "all", "none"],
)
def test_padding_stays_at_a_live_rows_block(
    slots: list[int], place: list[int], kind: list[int], tpu_memory: None
) -> None:
    for want, have in zip((place, kind), plan(jnp.asarray(slots)), strict=True):
        np.testing.assert_array_equal(have, want)
    random = np.random.default_rng(0)
    rows = [x[0] for x in sequence(3, 1, 8, 24)[:5]]
    pool = random.standard_normal((6, 2, 8, 24)).astype(np.float32)
    live = [row for row, slot in enumerate(slots) if slot >= 0]
    used = [slots[row] for row in live]
    unused = [slot for slot in range(6) if slot not in used]
    pool[unused] = np.where(random.random(pool[unused].shape) < 0.5, np.nan, pool[unused])
    step = jax.jit(functools.partial(kda_step, implementation="tpu-interpret"))
    out, new = map(np.asarray, step(*rows, pool, slots=np.array(slots)))
    np.testing.assert_array_equal(new[unused], pool[unused])
    np.testing.assert_array_equal(out[[row for row in range(3) if row not in live]], 0)
    q, k, v, g, beta = (x[live] for x in rows)
    want, states = kda_step(q, k, v, g, beta, pool[used], implementation="reference")
    assert_close("out", want, out[live], 1e-6)
    assert_close("state", states, new[used], 1e-6)


@pytest.mark.parametrize("heads", [1, 7, 12])
def test_a_step_takes_any_number_of_heads(heads: int) -> None:
    random = np.random.default_rng(heads)
    q, k, v, g = (random.standard_normal((2, heads, size)).astype(np.float32) for size in (8, 8, 3, 8))
    beta, pool = random.random((2, heads)), random.standard_normal((2, heads, 8, 3))
    arguments = q, k, v, -np.abs(g), beta.astype(np.float32), pool.astype(np.float32)
    want, states = kda_step(*arguments, implementation="reference")
    out, new = kda_step(*arguments, implementation="tpu-interpret")
    assert_close("out", want, out, 1e-6)
    assert_close("state", states, new, 1e-6)
