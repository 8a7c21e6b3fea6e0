"""KDA against float64: goldens, gradients, and the laws, for every implementation."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from measure import assert_close
from pallas_kernels import kda_gate, kda_prefill, kda_step, l2_normalize

BITS = pytest.mark.optimised

LB = -5.0
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "reference": dict(implementation="reference"),
    "xla16": dict(implementation="xla", chunk_size=16),
    "xla32": dict(implementation="xla", chunk_size=32),
    "xla64": dict(implementation="xla", chunk_size=64),
    "bounded16": dict(implementation="xla", chunk_size=16, gate_lower_bound=LB),
    "bounded32": dict(implementation="xla", chunk_size=32, gate_lower_bound=LB),
    "bounded64": dict(implementation="xla", chunk_size=64, gate_lower_bound=LB),
    "triton16": dict(implementation="triton-interpret", chunk_size=16),
    "triton32": dict(implementation="triton-interpret", chunk_size=32),
    "triton64": dict(implementation="triton-interpret", chunk_size=64),
    "tpu64": dict(implementation="tpu-interpret", chunk_size=64),
}
BOUNDED_CASES = ("mild", "lb5", "lb5_saturated", "identical_keys_b1", "g0_b1", "varlen_1_2_17_16_39")
CASES = (*BOUNDED_CASES, "softplus_A16", "half0_half30", "reset_row")  # these have g < -5
XLA: dict[str, dict[str, Any]] = {
    "exact": dict(implementation="xla"),
    "bounded": dict(implementation="xla", gate_lower_bound=LB),
}
KERNELS: dict[str, dict[str, Any]] = {
    "triton": dict(implementation="triton-interpret"),
    "tpu": dict(implementation="tpu-interpret"),
}
EACH = pytest.mark.parametrize("options", [*XLA.values(), *KERNELS.values()], ids=[*XLA, *KERNELS])
# A kernel's body fixes its shapes and its order: its bits do not hang on what XLA makes of the program around it.
EACH_TO_THE_BIT = pytest.mark.parametrize(
    "options",
    [*(pytest.param(x, marks=BITS) for x in XLA.values()), *KERNELS.values()],
    ids=[*XLA, *KERNELS],
)


# Less work for LLVM, three times faster to compile: where bounds are on rounding. Laws on bits run as users run.
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def compiled(quick: bool = False, **options):
    """One program for all calls with these static options."""
    return jax.jit(functools.partial(kda_prefill, **options), compiler_options=QUICK if quick else {})


@pytest.mark.parametrize(
    "case, name",
    [(c, n) for n in IMPLEMENTATIONS for c in (BOUNDED_CASES if n.startswith("bounded") else CASES)],
)
def test_golden(golden, case, name):
    arrays = {
        key.split(".")[1]: x for key, x in golden("kda_ops.safetensors").items() if key.startswith(case + ".")
    }
    options = IMPLEMENTATIONS[name]
    inputs = [arrays[x] for x in ("q", "k", "v", "g", "beta", "h0")]
    packed = {"cu_seqlens": arrays["cu_seqlens"]} if "cu_seqlens" in arrays else {}
    quick = options.get("chunk_size") in (16, 64)  # the default, 32, as users run it
    out, state = compiled(quick, **options)(*inputs, **packed)
    bound = 2e-5 if case == "reset_row" else 5e-6
    assert_close("out", arrays["o"], out, bound)
    assert_close("state", arrays["S"], state, bound)


def inputs(
    gate: str,
    *,
    batch=1,
    tokens=75,
    heads=2,
    keys=16,
    values=24,
    states=None,
    seed=0,
    dtype: DTypeLike = np.float32,
):
    """Random q, k (unit length), v, g, beta and state, with g of the kind asked for."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal
    q, k = normal((2, batch, tokens, heads, keys))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, state = normal((batch, tokens, heads, values)), normal((states or batch, heads, keys, values))
    beta, z = 1 / (1 + np.exp(-normal((batch, tokens, heads)))), normal((batch, tokens, heads, keys))
    g = -random.uniform(1, 16, (heads, 1)) * np.log1p(np.exp(z))
    match gate:
        case "bounded":
            g = LB / (1 + np.exp(-2 * z))
        case "equal_keys":
            g, beta, k = np.full_like(z, -1e-3), np.ones_like(beta), np.broadcast_to(k[:, :1], k.shape)
        case "no_decay":
            g, beta = np.zeros_like(z), np.ones_like(beta)
        case "reset":
            g = -0.1 * np.abs(z)
            g[:, tokens // 2] = -1000.0
    return tuple(np.asarray(x, dtype) for x in (q, k, v, g, beta, state))


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grid": (dict(batch=2), {}),
    "resumed": (dict(batch=2), dict(start=[5, 130], lengths=[75, 50])),
    "pack": (dict(states=5), dict(cu_seqlens=[0, 1, 1, 2, 40, 70])),
}


@functools.cache
def gradient(layout: str, implementation: str, bound: float | None):
    options = dict(LAYOUTS[layout][1], implementation=implementation, gate_lower_bound=bound)

    def loss(q, k, v, g, beta, state, weigh_out, weigh_state):
        out, final = kda_prefill(q, k, v, g, beta, state, **options)
        return jnp.sum(out * weigh_out) + jnp.sum(final * weigh_state)

    return jax.jit(jax.grad(loss, argnums=range(6)), compiler_options=QUICK)


GATES = ("softplus", "bounded", "equal_keys", "no_decay", "reset")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "gate, bound, implementation",
    [(gate, None, name) for name in ("xla", "triton-interpret") for gate in GATES]
    + [(gate, LB, "xla") for gate in ("bounded", "equal_keys", "no_decay")]
    + [(gate, None, "tpu-interpret") for gate in GATES],
)
def test_gradients(layout, gate, bound, implementation):
    arguments = inputs(gate, seed=3, **LAYOUTS[layout][0])
    random = np.random.default_rng(9)
    weights = [random.standard_normal(arguments[i].shape).astype(np.float32) for i in (2, 5)]
    got = gradient(layout, implementation, bound)(*arguments, *weights)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in (*arguments, *weights)]
        want = jax.tree.map(np.asarray, gradient(layout, "reference", None)(*wide))
    for name, a, b in zip(("q", "k", "v", "g", "beta", "state"), want, got, strict=True):
        assert np.isfinite(np.asarray(b)).all(), name
        assert_close(f"d{name}", a, b, 1e-4 if name == "g" else 2e-5)


@EACH
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 200])
def test_lengths_against_reference(tokens, options):
    arguments = inputs("bounded", tokens=200, seed=tokens)
    run = compiled(**options)
    out, state = run(*arguments, lengths=np.array([tokens]))
    want, final = compiled(implementation="reference")(*arguments, lengths=np.array([tokens]))
    assert_close("out", want, out, 5e-6)
    assert_close("state", final, state, 5e-6)


def cut(x, begin, end):
    return x[:, begin:end]


@pytest.mark.parametrize(
    "gate, options",
    [
        pytest.param("softplus", XLA["exact"], marks=BITS),
        pytest.param("bounded", XLA["exact"], marks=BITS),
        pytest.param("bounded", XLA["bounded"], marks=BITS),
        ("softplus", KERNELS["triton"]),
        ("softplus", KERNELS["tpu"]),
    ],
    ids=["softplus-exact", "bounded-exact", "bounded-bounded", "softplus-triton", "softplus-tpu"],
)
def test_split_on_the_grid_keeps_every_bit(gate, options):
    *sequence, state = inputs(gate, tokens=200)
    run = compiled(**options)
    whole, final = run(*sequence, state, start=np.array([0]))
    for edges in ([0, 64, 128, 192, 200], [0, 192, 200]):
        parts, carried = [], state
        for begin, end in itertools.pairwise(edges):
            out, carried = run(*(cut(x, begin, end) for x in sequence), carried, start=np.array([begin]))
            parts.append(out)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
        np.testing.assert_array_equal(carried, final)


@EACH_TO_THE_BIT
@pytest.mark.parametrize("at", [1, 2, 3, 15, 16, 17, 63, 65, 127])
def test_split_anywhere_and_back_on_the_grid(at, options):
    """A cut off the grid changes rounding only, and a later cut on the grid changes nothing more."""
    *sequence, state = inputs("bounded", tokens=200)
    program = compiled(**options)

    def run(begin, end, state):
        """Tokens [begin, end) at the front of 200 rows: one program for all cuts."""
        moved = [
            np.concatenate([x[:, begin:end], np.ones_like(x[:, : 200 - end + begin])], 1) for x in sequence
        ]
        out, state = program(*moved, state, start=np.array([begin]), lengths=np.array([end - begin]))
        return out[:, : end - begin], state

    whole, final = run(0, 200, state)
    head, carried = run(0, at, state)
    tail, end = run(at, 200, carried)
    assert_close("out", whole, np.concatenate([head, tail], axis=1), 5e-6)
    assert_close("state", final, end, 5e-6)
    middle, carried = run(at, 192, carried)
    last, resumed = run(192, 200, carried)
    np.testing.assert_array_equal(np.concatenate([middle, last], axis=1), tail)
    np.testing.assert_array_equal(resumed, end)


@EACH_TO_THE_BIT
def test_batch_is_the_loop_over_its_rows(options):
    arguments = inputs("bounded", batch=3, tokens=130)
    lengths, start = np.array([130, 17, 64]), np.array([0, 3, 64])
    run = compiled(**options)
    out, final = run(*arguments, lengths=lengths, start=start)
    for row, count in enumerate(lengths):
        alone, state = run(
            *(x[row : row + 1, :count] for x in arguments[:5]),
            arguments[5][row : row + 1],
            start=start[row : row + 1],
        )
        np.testing.assert_array_equal(out[row, :count], alone[0])
        np.testing.assert_array_equal(out[row, count:], 0)
        np.testing.assert_array_equal(final[row], state[0])


@EACH_TO_THE_BIT
def test_pack_is_its_sequences_one_by_one(options):
    cu = [0, 0, 1, 34, 35, 100, 164, 164]
    arguments = inputs("bounded", tokens=170, states=7)
    run = compiled(**options)
    poisoned = [
        np.concatenate([x[:, :164], np.full_like(x[:, 164:], fill)], 1)
        for x, fill in zip(arguments[:5], (np.nan, 1e30, np.nan, np.nan, 1e30), strict=True)
    ]
    out, final = run(*poisoned, arguments[5], cu_seqlens=np.array(cu))
    np.testing.assert_array_equal(out[:, 164:], 0)
    for n, (begin, end) in enumerate(itertools.pairwise(cu)):
        state = arguments[5][n : n + 1]
        if begin == end:
            np.testing.assert_array_equal(final[n], state[0])
            continue
        alone, last = run(*(cut(x, begin, end) for x in arguments[:5]), state, start=np.array([0]))
        np.testing.assert_array_equal(out[0, begin:end], alone[0])
        np.testing.assert_array_equal(final[n], last[0])


@EACH_TO_THE_BIT
@pytest.mark.parametrize("layout", ["grid", "pack"])
def test_no_token_sees_the_future(layout, options):
    arguments = inputs("bounded", tokens=96)
    where = {} if layout == "grid" else {"cu_seqlens": np.array([0, 96])}
    run = compiled(**options)
    before, _ = run(*arguments, **where)
    for at in (1, 5, 15, 16, 17, 33, 64, 90):
        random = np.random.default_rng(at)
        changed = [x.copy() for x in arguments[:5]]
        for x in changed[:3]:
            x[:, at:] = random.standard_normal(x[:, at:].shape)
        changed[3][:, at:] = LB * random.random(changed[3][:, at:].shape)
        after, _ = run(*changed, arguments[5], **where)
        np.testing.assert_array_equal(after[:, :at], before[:, :at])
        assert (np.asarray(after[:, at:]) != np.asarray(before[:, at:])).any()


BOUNDARIES = [1, 63, 64, 65, 100, 199]


@EACH_TO_THE_BIT
@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_states_at_boundaries_are_those_of_separate_runs(options, traced):
    arguments = inputs("bounded", tokens=200)
    run = compiled(**options)
    asked = np.array([100, 1, 63, 200, 65, 0, 64, 199])  # in any order
    call = run if traced else functools.partial(kda_prefill, **options)
    out, final, states = call(*arguments, boundaries=asked)
    assert states.shape == (1, len(asked), 2, 16, 24)
    plain, end = run(*arguments, start=np.array([0]))
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(final, end)
    for i, count in enumerate(asked):
        _, want = run(*arguments, lengths=np.array([count]))
        np.testing.assert_array_equal(states[:, i], want)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret", "tpu-interpret"])
def test_boundaries_of_rows_and_packs(implementation):
    run = compiled(implementation=implementation)
    arguments = inputs("softplus", batch=2, tokens=70)
    asked = np.array([[3, 64], [70, 16]])
    _, _, want = compiled(implementation="reference")(*arguments, boundaries=asked)
    for where in ({"start": np.array([0, 9])}, {}):  # the second are whole rows that advance together
        _, _, states = run(*arguments, boundaries=asked, **where)
        assert_close("rows", want, states, 5e-6)
    packed = inputs("softplus", tokens=70, states=3)
    asked = np.array([[0, 20], [1, 1], [49, 30]])
    _, _, states = run(*packed, boundaries=asked, cu_seqlens=np.array([0, 20, 21, 70]))
    _, _, want = compiled(implementation="reference")(
        *packed, boundaries=asked, cu_seqlens=np.array([0, 20, 21, 70])
    )
    assert_close("packs", want, states, 5e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton-interpret", "tpu-interpret"])
def test_no_tokens_and_no_boundaries(implementation):
    arguments = inputs("bounded", batch=2, tokens=8, keys=4, values=4)
    _, final, states = kda_prefill(*arguments, boundaries=[], implementation=implementation)
    assert states.shape == (2, 0, *final.shape[1:])
    none = [*(x[:, :0] for x in arguments[:5]), arguments[5]]
    out, final, states = kda_prefill(*none, boundaries=[0], implementation=implementation)
    assert out.shape == (2, 0, 2, 4)
    np.testing.assert_array_equal(final, arguments[5])
    np.testing.assert_array_equal(states[:, 0], arguments[5])


@EACH
def test_gradients_with_boundaries_are_refused(options):
    arguments = inputs("bounded", tokens=16)
    with pytest.raises(NotImplementedError, match="cut the call at the boundary"):
        jax.grad(lambda q: jnp.sum(kda_prefill(q, *arguments[1:], boundaries=[3], **options)[0]))(
            jnp.asarray(arguments[0])
        )


@pytest.mark.parametrize("keys, values", [(32, 32), (96, 48), (20, 7)])
@pytest.mark.parametrize("implementation", ["reference", "xla", "triton-interpret", "tpu-interpret"])
def test_a_step_touches_its_slots_only(implementation, keys, values):
    arguments = inputs("softplus", batch=3, tokens=1, keys=keys, values=values)
    rows = [x[:, 0] for x in arguments[:5]]
    pool = np.random.default_rng(1).standard_normal((6, 2, keys, values)).astype(np.float32)
    pool[[1, 5]] = np.nan
    step = jax.jit(functools.partial(kda_step, implementation=implementation))
    out, new = step(*rows, pool, slots=np.array([4, -1, 0]))
    q, k, v, g, beta = (x[[0, 2]] for x in rows)
    want, states = kda_step(q, k, v, g, beta, pool[[4, 0]], implementation="reference")
    assert_close("out", want, np.asarray(out)[[0, 2]], 1e-6)
    assert_close("state", states, np.asarray(new)[[4, 0]], 1e-6)
    np.testing.assert_array_equal(out[1], 0)
    np.testing.assert_array_equal(np.asarray(new)[[1, 2, 3, 5]], pool[[1, 2, 3, 5]])


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton-interpret", "tpu-interpret"])
def test_a_step_of_no_rows_leaves_the_pool(implementation):
    q, k, v, g, beta = (x[:0, 0] for x in inputs("softplus", tokens=1)[:5])
    pool = np.ones((3, 2, 16, 24), np.float32)
    out, new = kda_step(q, k, v, g, beta, pool, slots=np.zeros(0, np.int32), implementation=implementation)
    assert out.shape == (0, 2, 24)
    np.testing.assert_array_equal(new, pool)


@pytest.mark.parametrize("gate, bound", [("softplus", 3e-3), ("bounded", 3e-3), ("equal_keys", 2e-2)])
@pytest.mark.parametrize("options", [XLA["exact"], *KERNELS.values()], ids=["exact", *KERNELS])
def test_half_inputs_cost_what_halves_cost(options, gate, bound):
    arguments = inputs(gate, tokens=200, keys=32, values=64)
    half = [jnp.asarray(x, jnp.bfloat16) for x in arguments[:3]]
    out, state = compiled(**options)(*half, *arguments[3:])
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (*half, *arguments[3:])]
        want, final = map(np.asarray, compiled(implementation="reference")(*wide))
    assert_close("out", want, out, bound)
    assert_close("state", final, state, bound)


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton-interpret", "tpu-interpret"])
@pytest.mark.parametrize("keys, values, heads, value_heads", [(1, 1, 1, 1), (20, 7, 1, 3), (64, 100, 2, 4)])
def test_any_size_and_grouped_value_heads(implementation, keys, values, heads, value_heads):
    q, k, *_ = inputs("softplus", tokens=20, heads=heads, keys=keys, values=values)
    _, _, v, g, beta, state = inputs("softplus", tokens=20, heads=value_heads, keys=keys, values=values)
    out, final = kda_prefill(q, k, v, g, beta, state, implementation=implementation)
    with jax.enable_x64(True):
        repeated = [np.repeat(x, value_heads // heads, axis=2).astype(np.float64) for x in (q, k)]
        wide = repeated + [x.astype(np.float64) for x in (v, g, beta, state)]
        want, last = map(np.asarray, kda_prefill(*wide, implementation="reference"))
    assert_close("out", want, out, 5e-6)
    assert_close("state", last, final, 5e-6)


def test_steps_are_a_prefill():
    arguments = inputs("softplus", batch=2, tokens=9)
    want, final = kda_prefill(*arguments, implementation="reference")
    for implementation in ("reference", "xla", "triton-interpret", "tpu-interpret"):
        step, state, outs = (
            functools.partial(kda_step, implementation=implementation),
            jnp.asarray(arguments[5]),
            [],
        )
        for t in range(9):
            out, state = jax.jit(step)(*(x[:, t] for x in arguments[:5]), state)
            outs.append(out)
        assert_close("out", want, np.stack(outs, axis=1), 5e-6)
        assert_close("state", final, state, 5e-6)


def test_options():
    q, k, v, g, beta, state = inputs("softplus", tokens=20)
    q, k = 3.0 * q, 0.5 * k
    normal = kda_prefill(q, k, v, g, beta, state, qk_l2norm=True)[0]
    by_hand = kda_prefill(l2_normalize(jnp.asarray(q)), l2_normalize(jnp.asarray(k)), v, g, beta, state)[0]
    np.testing.assert_array_equal(normal, by_hand)
    assert_close(
        "scale",
        4.0 * np.asarray(normal),
        kda_prefill(q, k, v, g, beta, state, qk_l2norm=True, scale=1.0)[0],
        1e-6,
    )
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out, final = kda_prefill(*half, g=g, beta=beta, state=state, qk_l2norm=True)
    assert out.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    forgotten = g.copy()
    forgotten[:, 7] = -np.inf
    out, final = kda_prefill(q, k, v, forgotten, beta, state)
    alone, last = kda_prefill(*(x[:, 7:] for x in (q, k, v, g, beta)))
    assert_close("after -inf", alone, out[:, 7:], 5e-6)
    assert_close("state after -inf", last, final, 5e-6)


def test_gates():
    random = np.random.default_rng(0)
    z, bias = random.standard_normal((4, 3, 8)) * 30, random.standard_normal((3, 8))
    a_log = np.log(random.uniform(1, 16, 3))
    soft = -np.exp(a_log)[:, None] * np.logaddexp(0, z + bias)
    bounded = LB / (1 + np.exp(-np.exp(a_log)[:, None] * (z + bias)))
    args = [jnp.asarray(x, jnp.float32) for x in (z, a_log, bias)]
    assert_close("softplus", soft, kda_gate(*args), 1e-6)
    assert_close("bounded", bounded, kda_gate(*args, lower_bound=LB), 1e-5)
    slope = jax.grad(lambda x: jnp.sum(kda_gate(x, args[1], args[2])))(jnp.full((4, 3, 8), 100.0))
    assert np.isfinite(np.asarray(slope)).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=np.zeros((1, 8, 2, 5), np.float32)), "q and k must be"),
        (dict(v=np.zeros((1, 8, 3, 4), np.float32)), "multiple of query heads, got HV=3, H=2"),
        (dict(g=np.zeros((1, 8, 2, 3), np.float32)), "g must be"),
        (dict(g=jnp.zeros((1, 8, 2, 4), jnp.bfloat16)), "compute the gate in float32"),
        (dict(beta=np.zeros((1, 8), np.float32)), "beta must be"),
        (dict(state=np.zeros((1, 2, 5, 4), np.float32)), r"\(1, 2, 4, 4\), got \(1, 2, 5, 4\)"),
        (dict(cu_seqlens=[0, 5, 3]), "must rise from 0"),
        (dict(cu_seqlens=[0, 9]), "at most 8 tokens, got"),
        (dict(boundaries=[9]), r"0\.\.8, got"),
        (dict(chunk_size=48), "16, 32 or 64"),
        (dict(gate_lower_bound=5.0), "must be negative"),
        (dict(implementation="cuda"), "unknown implementation='cuda'"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_bad_calls_say_what_was_wrong(change, message):
    q, k, v, g, beta, state = inputs("softplus", tokens=8, keys=4, values=4)
    arguments = dict(q=q, k=k, v=v, g=g, beta=beta, state=state) | change
    with pytest.raises(ValueError, match=message):
        kda_prefill(**arguments)


@pytest.mark.parametrize("slots", [[0, 6, -1], [4, -1, 4]], ids=["outside", "twice"])
def test_a_step_says_which_slots_cannot_be(slots):
    q, k, v, g, beta = (x[:, 0] for x in inputs("softplus", batch=3, tokens=1, keys=4, values=4)[:5])
    with pytest.raises(ValueError, match="below S=6 and none twice, got"):
        kda_step(q, k, v, g, beta, np.zeros((6, 2, 4, 4), np.float32), slots=slots)


def test_a_tpu_has_one_chunk():
    q, k, v, g, beta, state = inputs("softplus", tokens=8, keys=4, values=4)
    with pytest.raises(ValueError, match="has chunks of 64 tokens, got chunk_size=32"):
        kda_prefill(q, k, v, g, beta, state, chunk_size=32, implementation="tpu-interpret")


def test_a_backend_refuses_with_its_reason():
    with jax.enable_x64(True):
        arguments = inputs("softplus", tokens=8, dtype=np.float64)
        with pytest.raises(ValueError, match="xla: computes in float32, got a float64 state"):
            kda_prefill(*arguments, implementation="xla")
