"""L2 norm, gate and shared heads inside `kda_prefill`, against the same written out in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from measure import assert_close
from pallas_kernels import Gate, kda_gate, kda_prefill, kda_step
from pallas_kernels.kda import pallas
from pallas_kernels.kda.prelude import Prelude

QUICK = {"xla_backend_optimization_level": 0}

# the gate's lower bound, value heads a query head, whether the gate has a bias
CASES = {"softplus": (None, 2, True), "bounded": (-5.0, 3, False), "bounded-bias": (-5.0, 1, True)}


def arrays(
    repeats: int, bound: float | None, biased: bool, *, tokens: int = 90, keys: int = 20, values: int = 24
) -> tuple[Any, ...]:
    """Random q, k, v, z, beta, state, A_log and dt_bias of one query head: some z beyond 88, one key of zeros."""
    random = np.random.default_rng(tokens + repeats)
    normal = random.standard_normal
    q, k = normal((2, 1, tokens, 1, keys)) * np.exp(normal((2, 1, tokens, 1, 1)))
    k[:, 7:8] = 0
    v, z = normal((1, tokens, repeats, values)), 5 * normal((1, tokens, repeats, keys))
    z[:, ::31, :, ::3] *= 30
    beta = 1 / (1 + np.exp(-normal((1, tokens, repeats))))
    A_log = np.log(random.uniform(1, 16, repeats)) if bound is None else 0.3 * normal(repeats)
    bias = normal((repeats, keys)) if biased else None
    all_of = (q, k, v, z, beta, normal((1, repeats, keys, values)), A_log, bias)
    return tuple(None if x is None else x.astype(np.float32) for x in all_of)


def written_out(q, k, v, z, beta, state, A_log, bias, *, bound: float | None, **where):
    """The definition on what the prelude's formulas give, in the inputs' precision."""
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, v.shape[2], axis=2) for x in (q, k))
    z = z if bias is None else z + bias
    rate = jnp.exp(A_log)[:, None]
    g = -rate * jnp.logaddexp(z, 0.0) if bound is None else bound / (1 + jnp.exp(-rate * z))
    return kda_prefill(q, k, v, g, beta, state, implementation="reference", **where)


def fused(q, k, v, z, beta, state, A_log, bias, *, bound: float | None, **options):
    gate = Gate(A_log, bias, bound)
    return kda_prefill(q, k, v, z, beta, state, qk_l2norm=True, gate=gate, **options)


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(fused, **options), compiler_options=QUICK)


@functools.cache
def definition(bound: float | None):
    return jax.jit(functools.partial(written_out, bound=bound), compiler_options=QUICK)


def in_float64(x: tuple[Any, ...], bound: float | None, **where) -> list[np.ndarray]:
    with jax.enable_x64(True):
        wide = [None if y is None else np.asarray(y, np.float64) for y in x]
        return [np.asarray(y) for y in definition(bound)(*wide, **where)]


@pytest.mark.parametrize(
    "implementation, case",
    [
        *(("triton-interpret", case) for case in CASES),
        *(("xla", case) for case in ("softplus", "bounded")),
        *((name, "softplus") for name in ("reference", "tpu-interpret")),
    ],
)
def test_prelude(implementation: str, case: str) -> None:
    bound, repeats, biased = CASES[case]
    x = arrays(repeats, bound, biased)
    want, final = in_float64(x, bound)
    out, state = compiled(bound=bound, implementation=implementation)(*x)
    assert_close("out", want, out, 5e-6)
    assert_close("state", final, state, 5e-6)


@pytest.mark.parametrize("case", ["softplus", "bounded"])
@pytest.mark.parametrize("equal", [False, True], ids=["any", "equal_keys"])
def test_halves_within_their_bounds(case: str, equal: bool) -> None:
    """Raw projections in half precision, as a layer has them; keys and queries are not rounded a second time."""
    bound, repeats, biased = CASES[case]
    x = list(arrays(repeats, bound, biased, keys=32, values=32))
    if equal:
        x[1], x[3] = np.broadcast_to(x[1][:, :1], x[1].shape), np.full_like(x[3], -7.0)
        x[4] = np.ones_like(x[4])
    x[:4] = [jnp.asarray(y, jnp.bfloat16) for y in x[:4]]
    want, final = in_float64(tuple(x), bound)
    out, state = compiled(bound=bound, implementation="triton-interpret")(*x)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    # rounding the output takes 1.7e-3 of it
    assert_close("out", want, out, 2e-2 if equal else 2.3e-3)
    assert_close("state", final, state, 2e-2 if equal else 3e-3)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
def test_packs_with_poison_between_and_states_at_boundaries(implementation: str) -> None:
    x = list(arrays(2, None, True))
    for i, fill in enumerate((np.nan, 1e30, np.nan, np.nan, 1e30)):
        x[i][:, 80:] = fill
    x[5] = np.random.default_rng(1).standard_normal((4, *x[5].shape[1:])).astype(np.float32)
    where = dict(
        cu_seqlens=np.array([0, 1, 18, 18, 80]), boundaries=np.array([[1, 0], [16, 3], [0, 0], [62, 17]])
    )
    got = compiled(bound=None, implementation=implementation)(*x, **where)
    clean = tuple(np.where(np.isfinite(y) & (abs(y) < 1e20), y, 0) for y in x)
    for name, a, b in zip(("out", "state", "marked"), in_float64(clean, None, **where), got, strict=True):
        assert_close(name, a, b, 5e-6)


def test_fused_keeps_every_bit_of_the_past_and_across_cuts() -> None:
    x = arrays(3, None, True, tokens=130)
    program = compiled(bound=None, implementation="triton-interpret")

    def run(begin: int, end: int, state, change: int | None = None):
        """Tokens [begin, end) in front of 130 rows, other ones from `change` on: one program for all calls."""
        moved = [np.concatenate([y[:, begin:end], y[:, : 130 - end + begin] + 1], axis=1) for y in x[:5]]
        if change is not None:
            moved = [np.concatenate([y[:, :change], 0.5 * y[:, change:]], axis=1) for y in moved]
        where = dict(start=np.array([begin]), lengths=np.array([end - begin]))
        out, state = program(*moved, state, *x[6:], **where)
        return np.asarray(out[:, : end - begin]), state

    whole, final = run(0, 130, x[5])
    for at in (1, 15, 16, 64, 100):
        changed, _ = run(0, 130, x[5], change=at)
        np.testing.assert_array_equal(changed[:, :at], whole[:, :at])
        assert (changed[:, at:] != whole[:, at:]).any()
    head, carried = run(0, 64, x[5])
    tail, end = run(64, 130, carried)
    np.testing.assert_array_equal(np.concatenate([head, tail], axis=1), whole)
    np.testing.assert_array_equal(end, final)


@pytest.mark.parametrize(
    "implementation, case",
    [
        ("xla", "softplus"),
        ("tpu-interpret", "bounded"),
        ("triton-interpret", "softplus"),
        ("triton-interpret", "bounded"),
    ],
)
def test_gradients_reach_what_was_given(implementation: str, case: str) -> None:
    bound, repeats, biased = CASES[case]
    x = arrays(repeats, bound, biased, tokens=40)
    random = np.random.default_rng(2)
    weights = [random.standard_normal(x[i].shape) for i in (2, 5)]
    indices = [i for i, y in enumerate(x) if y is not None]

    def gradient(run):
        def loss(*some):
            given: list[Any] = [None] * 8
            for i, y in zip(indices, some, strict=True):
                given[i] = y
            return sum(jnp.sum(a * b.astype(a.dtype)) for a, b in zip(run(*given), weights, strict=True))

        return jax.jit(jax.grad(loss, range(len(indices))), compiler_options=QUICK)

    some = [x[i] for i in indices]
    got = gradient(functools.partial(fused, bound=bound, implementation=implementation))(*some)
    with jax.enable_x64(True):
        run = gradient(functools.partial(written_out, bound=bound))
        want = jax.tree.map(np.asarray, run(*(y.astype(np.float64) for y in some)))
    names = ("q", "k", "v", "z", "beta", "state", "A_log", "dt_bias")
    for i, a, b in zip(indices, want, got, strict=True):
        assert_close(f"d{names[i]}", a, b, 1e-4 if i in (3, 6, 7) else 2e-5)


@pytest.mark.parametrize("own", [False, True], ids=["ready", "fused"])
def test_a_backward_pass_is_handed_what_is_ready(own: bool) -> None:
    """Whatever the forward pass does itself."""
    q, k, v, z, beta, state, A_log, bias = map(jnp.asarray, arrays(2, None, True, tokens=8))
    seen: dict[str, pallas.Sequence] = {}

    def forward(x: pallas.Sequence, *_: Any, **options: Any) -> pallas.Results:
        seen["forward"] = x
        return x.v, x.states, None

    def backward(
        x: pallas.Sequence, pack: Any, d_out: jax.Array, d_finals: jax.Array, **_: Any
    ) -> pallas.Sequence:
        seen["backward"] = x
        return jax.tree.map(jnp.ones_like, x)

    kernels = pallas.Kernels(forward, backward, forward if own else None)
    prelude = Prelude(qk_l2norm=True, gate=Gate(A_log, bias))

    def run(q, k, z, A_log):
        gate = Gate(A_log, bias)
        x = (q, k, v, z, beta, state, prelude._replace(gate=gate), None, None, 1.0, None, None)
        return jnp.sum(pallas.prefill(kernels, False, *x)[0])

    with jax.disable_jit():
        grads = jax.grad(run, range(4))(q, k, z, A_log)
    assert [y.shape for y in grads] == [y.shape for y in (q, k, z, A_log)]
    x = seen["backward"]
    assert x.q.shape == x.k.shape == z.shape
    norms = np.linalg.norm(x.k, axis=-1)
    assert_close(
        "norms", np.where(np.arange(8) == 7, 0, 1.0)[None, :, None] * np.ones((1, 1, 2)), norms, 1e-4
    )
    np.testing.assert_array_equal(x.g, kda_gate(z, A_log, bias))
    assert seen["forward"].q.shape == (q.shape if own else z.shape)
    assert (np.asarray(seen["forward"].g) == np.asarray(z)).all() == own


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton-interpret"])
def test_a_step_takes_its_gate(implementation: str) -> None:
    x = arrays(2, None, True, tokens=1)
    want, final = in_float64(x, None)
    q, k, v, z, beta = (y[:, 0] for y in x[:5])
    out, state = kda_step(
        q, k, v, z, beta, x[5], qk_l2norm=True, gate=Gate(*x[6:]), implementation=implementation
    )
    assert_close("out", want[:, 0], out, 5e-6)
    assert_close("state", final, state, 5e-6)


def test_a_gates_bound_is_a_promise_and_nothing_else_changes() -> None:
    """On "xla" the program is that of a caller who takes the gate first."""
    q, k, v, z, beta, state, A_log, bias = arrays(2, -5.0, True)

    def by_hand(z, A_log, bias):
        g = kda_gate(z, A_log, bias, lower_bound=-5.0)
        return kda_prefill(q, k, v, g, beta, state, qk_l2norm=True, gate_lower_bound=-5.0)

    def inside(z, A_log, bias):
        return fused(q, k, v, z, beta, state, A_log, bias, bound=-5.0)

    def text(function) -> str:
        return jax.jit(function).lower(z, A_log, bias).as_text().replace(function.__name__, "")

    def sums(text: str) -> list[str]:
        return sorted(line.split("=")[-1].split("%")[0] for line in text.splitlines())

    assert sums(text(inside)) == sums(text(by_hand))


@pytest.mark.parametrize(
    "gate, message",
    [
        (Gate(jnp.zeros(3)), r"A_log must be \[H\] = \[2\]"),
        (Gate(jnp.zeros(2), jnp.zeros((2, 3))), r"dt_bias must be \[H, K\] = \[2, 20\], got \(2, 3\)"),
        (Gate(jnp.zeros(2), None, 5.0), "lower_bound=5.0 must be negative"),
    ],
    ids=["A_log", "dt_bias", "bound"],
)
def test_a_wrong_gate_says_what_was_wrong(gate: Gate, message: str) -> None:
    q, k, v, z, beta, state, *_ = arrays(2, None, False)
    with pytest.raises(ValueError, match=message):
        kda_prefill(q, k, v, z, beta, state, gate=gate)
    with pytest.raises(ValueError, match=message):
        kda_step(q[:, 0], k[:, 0], v[:, 0], z[:, 0], beta[:, 0], state, gate=gate)


def test_a_bound_is_known_when_the_program_is_made() -> None:
    q, k, v, z, beta, state, A_log, _ = arrays(2, None, False)
    with pytest.raises(ValueError, match="make the Gate inside the jitted function"):
        jax.jit(lambda gate: kda_prefill(q, k, v, z, beta, state, gate=gate))(Gate(A_log, None, -5.0))
