"""Mixture of expert MLPs: definition, independence of rows to the bit, gradients, size of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from measure import assert_close
from pallas_kernels import expert_mlp

WIDTH, INNER, EXPERTS, SLOTS = 20, 12, 5, 2


def inputs(num_tokens: int, num_experts: int = EXPERTS, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :SLOTS].astype(np.int32)
    shapes = (
        (num_tokens, WIDTH),
        (num_tokens, SLOTS),
        (num_experts, WIDTH, 2 * INNER),
        (num_experts, INNER, WIDTH),
    )
    x, weights, w_gate_up, w_down = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, ids, weights, w_gate_up, w_down


def by_hand(x, ids, weights, w_gate_up, w_down) -> np.ndarray:
    y = np.zeros(x.shape)
    for n, s in np.ndindex(*ids.shape):
        gate, up = np.split(x[n].astype(np.float64) @ w_gate_up[ids[n, s]], 2)
        y[n] += weights[n, s] * (gate / (1 + np.exp(-gate)) * up) @ w_down[ids[n, s]]
    return y


mix = jax.jit(expert_mlp, static_argnames=("activation", "implementation"))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 17, 200])
def test_matches_the_formula(num_tokens: int, implementation: str) -> None:
    arrays = inputs(num_tokens)
    assert_close("y", by_hand(*arrays), mix(*arrays, implementation=implementation), 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 700])
def test_uneven_loads(num_tokens: int) -> None:
    """One expert takes nearly all, one takes one, a token names an expert twice, one expert has nothing to do."""
    x, ids, weights, *matrices = inputs(num_tokens)
    ids[:, 0], ids[:, 1], ids[-1, 1] = 3, 1, 3
    ids[0, 0] = 4
    assert_close("y", by_hand(x, ids, weights, *matrices), mix(x, ids, weights, *matrices), 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 130])
def test_an_id_of_no_expert_adds_nothing(num_tokens: int) -> None:
    x, ids, weights, *matrices = inputs(num_tokens)
    none = np.random.default_rng(1).random(ids.shape) < 0.4
    none[0, 0] = True
    dropped = np.where(none, np.where(weights > 0, EXPERTS, -1), ids)
    want = by_hand(x, ids, np.where(none, 0, weights), *matrices)
    for implementation in ("reference", "xla"):
        got = mix(x, dropped, weights, *matrices, implementation=implementation)
        assert_close(implementation, want, got, 1e-6)


@pytest.mark.optimised
def test_a_row_keeps_its_bits_whatever_stands_around_it() -> None:
    x, ids, weights, *matrices = inputs(900)
    whole = mix(x, ids, weights, *matrices)
    for part in (slice(0, 64), slice(333, 620), slice(880, 900)):
        np.testing.assert_array_equal(mix(x[part], ids[part], weights[part], *matrices), whole[part])
    others = x.copy()
    others[1::2] = np.nan
    rerouted = np.where(np.arange(900)[:, None] % 2, 0, ids).astype(np.int32)
    np.testing.assert_array_equal(mix(others, rerouted, weights, *matrices)[::2], whole[::2])


def sine_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.sin(gate) * (1 + up * up)


@pytest.mark.parametrize("num_tokens", [1, 3, 90, 400])
def test_gradients_match_float64(num_tokens: int) -> None:
    x, ids, *floats = inputs(num_tokens)
    ids[-1, 0] = EXPERTS
    cotangent = np.random.default_rng(2).standard_normal(x.shape)

    def loss(implementation, x, *floats):
        y = expert_mlp(x, jnp.asarray(ids), *floats, activation=sine_gate, implementation=implementation)
        return (y * cotangent.astype(y.dtype)).sum()

    gradient = jax.jit(jax.grad(loss, (1, 2, 3, 4)), static_argnums=0)
    got = gradient("xla", *map(jnp.asarray, (x, *floats)))
    with jax.enable_x64(True):
        exact = gradient("reference", *(jnp.asarray(a, jnp.float64) for a in (x, *floats)))
        exact = [np.asarray(a) for a in exact]
    for name, reference, mine in zip(["dx", "dweights", "dgate_up", "ddown"], exact, got):
        assert_close(name, reference, mine, 1e-6)


def test_bfloat16_sums_in_float32() -> None:
    x, ids, weights, *matrices = inputs(70)
    low = [jnp.asarray(a, jnp.bfloat16) for a in (x, *matrices)]
    got = mix(low[0], ids, weights, *low[1:])
    exact = mix(low[0].astype(jnp.float32), ids, weights, *(a.astype(jnp.float32) for a in low[1:]))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))
    gradient = jax.jit(
        jax.grad(lambda *args: mix(args[0], ids, *args[1:]).astype(jnp.float32).sum(), (0, 1, 2, 3))
    )
    dtypes = [g.dtype for g in gradient(low[0], weights, *low[1:])]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize("num_tokens", [1, 4, 100])
def test_the_program_does_not_grow_with_experts(num_tokens: int) -> None:
    def lines(num_experts: int) -> int:
        return len(mix.lower(*inputs(num_tokens, num_experts)).as_text().splitlines())

    assert lines(256) == lines(32)


@pytest.mark.optimised
def test_decode_inside_a_scan() -> None:
    x, ids, weights, *matrices = map(jnp.asarray, inputs(4))

    def token(x, _):
        y = expert_mlp(x, ids, weights, *matrices)
        return y, y

    _, out = jax.jit(lambda x: jax.lax.scan(token, x, length=2))(x)
    assert_close("second", mix(mix(x, ids, weights, *matrices), ids, weights, *matrices), out[1], 1e-6)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (4, 19), "x"),
        (1, (4, 3), "expert_ids"),
        (3, (EXPERTS, WIDTH, INNER), "w_gate_up"),
        (4, (4, 4), "w_down"),
    ],
    ids=["x", "ids", "gate_up", "down"],
)
def test_says_what_is_wrong(place: int, shape: tuple[int, ...], message: str) -> None:
    arrays = list(map(jnp.asarray, inputs(4)))
    arrays[place] = jnp.zeros(shape, arrays[place].dtype)
    with pytest.raises(ValueError, match=message):
        expert_mlp(*arrays)
