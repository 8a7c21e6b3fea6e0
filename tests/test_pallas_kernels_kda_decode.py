"""A KDA layer's decode step as one operator: against float64, over slots, with drafts and what is kept of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from numpy.typing import NDArray

from measure import assert_close
from pallas_kernels import (
    KDAParameters,
    kda_accept,
    kda_decode,
    kda_draft,
    kda_gate,
    kda_step,
    rms_norm_gated,
    short_conv_step,
)

IMPLEMENTATIONS = ("reference", "xla", "triton-interpret")
EPS = 1e-5
GATES = {"softplus": None, "bounded": -5.0}
SLOTS = np.array([4, -1, 0])  # of six; 1, 2, 3 and 5 are nobody's
LIVE, OTHERS = [0, 2], [1, 2, 3, 5]


class Sizes(NamedTuple):
    heads: int = 2
    value_heads: int = 2
    keys: int = 16
    values: int = 24
    taps: int = 4


SIZES = {
    "plain": Sizes(),
    "grouped": Sizes(2, 6, 20, 7, 2),
    "single": Sizes(1, 1, 1, 1, 3),
    "wide": Sizes(1, 2, 96, 80, 3),  # more than one piece of the kernel's both ways
}


Four: TypeAlias = tuple[NDArray, NDArray, NDArray, NDArray]


def each(function: Callable[[NDArray], NDArray], arrays: Four) -> Four:
    mixed, decay, beta, gate = map(function, arrays)
    return mixed, decay, beta, gate


class Call(NamedTuple):
    """mixed, decay, beta, gate [B, M, ...]; the parameters; pools of states and windows."""

    tokens: Four
    layer: KDAParameters
    states: NDArray
    windows: NDArray

    def at(self, m: int) -> Four:
        return each(lambda x: x[:, m], self.tokens)


def call(sizes: Sizes, *, rows=3, drafts=1, size=6, dtype: DTypeLike = np.float32, seed=0) -> Call:
    """Random arrays; the activations are drawn in `dtype`."""
    random = np.random.default_rng(seed)
    heads, value_heads, keys, values, taps = sizes
    channels = 2 * heads * keys + value_heads * values

    def normal(*shape: int, dtype: DTypeLike = dtype) -> NDArray:
        return np.asarray(jnp.asarray(random.standard_normal(shape), dtype))

    lead = (rows, drafts)
    tokens = (
        normal(*lead, channels),
        2 * normal(*lead, value_heads, keys),
        normal(*lead, value_heads),
        normal(*lead, value_heads, values),
    )
    rates = np.log(random.uniform(1, 16, value_heads)).astype(np.float32)
    layer = KDAParameters(
        *(
            jnp.asarray(x)
            for x in (normal(taps, channels), rates, normal(value_heads, keys, dtype=np.float32))
        ),
        norm=jnp.asarray(1 + normal(values)),
    )
    states = normal(size, value_heads, keys, values, dtype=np.float32)
    return Call(tokens, layer, states, normal(size, taps - 1, channels))


def sigmoid(x: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-x))


def by_hand(x: Call, row: int, slot: int, bound: float | None) -> tuple[NDArray, NDArray, NDArray]:
    """One row's tokens in float64 NumPy: out [M, HV, V], and the state and the window after each."""
    mixed, decay, beta, gate = (np.asarray(a[row]).astype(np.float64) for a in x.tokens)
    conv, A_log, dt_bias, norm = (np.asarray(a).astype(np.float64) for a in x.layer)
    state, window = (np.asarray(a[slot]).astype(np.float64) for a in (x.states, x.windows))
    value_heads, keys, values = state.shape
    heads = (conv.shape[1] - value_heads * values) // (2 * keys)
    results: list[tuple[NDArray, NDArray, NDArray]] = []
    for now, z, strength, opening in zip(mixed, decay, beta, gate):
        inputs = np.concatenate([window, now[None]])
        window, y = inputs[1:], np.sum(inputs * conv, axis=0)
        q, k, v = np.split(y * sigmoid(y), [heads * keys, 2 * heads * keys])
        q, k = (
            np.repeat(a / np.sqrt(np.sum(a * a, -1, keepdims=True) + 1e-6), value_heads // heads, axis=0)
            for a in (q.reshape(heads, keys), k.reshape(heads, keys))
        )
        rate = np.exp(A_log)[:, None]
        g = -rate * np.logaddexp(0, z + dt_bias) if bound is None else bound * sigmoid(rate * (z + dt_bias))
        state = np.exp(g)[..., None] * state
        error = v.reshape(value_heads, values) - np.einsum("hkv,hk->hv", state, k)
        state = state + np.einsum("h,hk,hv->hkv", sigmoid(strength), k, error)
        out = np.einsum("hkv,hk->hv", state, q) * keys**-0.5
        out = out / np.sqrt(np.mean(out * out, -1, keepdims=True) + EPS) * norm * sigmoid(opening)
        results.append((out, state, window))
    out, states, windows = (np.stack(column) for column in zip(*results))
    return out, states, windows


@functools.cache
def compiled(
    operator: Callable[..., Any], implementation: str, bound: float | None = None
) -> Callable[..., Any]:
    return jax.jit(functools.partial(operator, eps=EPS, lower_bound=bound, implementation=implementation))


FORMULAS = pytest.mark.parametrize(
    "name, gate",
    [("plain", "softplus"), ("grouped", "softplus"), ("single", "bounded"), ("wide", "bounded")],
)


@FORMULAS
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_is_its_formula(implementation: str, name: str, gate: str) -> None:
    x = call(SIZES[name])
    out, states, windows = map(
        np.asarray,
        compiled(kda_decode, implementation, GATES[gate])(
            *x.at(0), x.layer, x.states, x.windows, slots=SLOTS
        ),
    )
    wanted = [by_hand(x, row, SLOTS[row], GATES[gate]) for row in LIVE]
    out_wanted, states_wanted, windows_wanted = (np.stack([w[i][0] for w in wanted]) for i in range(3))
    assert_close("out", out_wanted, out[LIVE], 5e-6)
    assert_close("states", states_wanted, states[SLOTS[LIVE]], 5e-6)
    np.testing.assert_array_equal(windows[SLOTS[LIVE]], windows_wanted.astype(np.float32))


@FORMULAS
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_drafts_are_their_formula(implementation: str, name: str, gate: str) -> None:
    x = call(SIZES[name], drafts=4)
    run = compiled(kda_draft, implementation, GATES[gate])
    got = run(*x.tokens, x.layer, x.states, x.windows, slots=SLOTS)
    for row in LIVE:
        out, states, windows = by_hand(x, row, SLOTS[row], GATES[gate])
        assert_close("out", out, got[0][row], 5e-6)
        assert_close("states", states, got[1][row], 5e-6)
        np.testing.assert_array_equal(got[2][row], windows.astype(np.float32))


@pytest.mark.parametrize("sizes", [SIZES["plain"], SIZES["grouped"]], ids=["plain", "grouped"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_drafts_are_tokens_one_by_one(implementation: str, sizes: Sizes) -> None:
    """In the kernel to the bit; of plain JAX XLA makes another program, inside whose loop it rounds elsewhere."""
    x = call(sizes, drafts=4)
    outs, *kept = compiled(kda_draft, implementation)(*x.tokens, x.layer, x.states, x.windows, slots=SLOTS)
    pools: Any = (x.states, x.windows)
    step = compiled(kda_decode, implementation)
    for m in range(4):
        out, *pools = step(*x.at(m), x.layer, *pools, slots=SLOTS)
        for name, want, got in (
            ("out", out[LIVE,], outs[LIVE, m]),
            ("states", pools[0][SLOTS[LIVE]], kept[0][LIVE, m]),
            ("windows", pools[1][SLOTS[LIVE]], kept[1][LIVE, m]),
        ):
            if implementation == "triton-interpret" or name == "windows":
                np.testing.assert_array_equal(got, want)
            else:
                assert_close(name, want, got, 1e-6)


@pytest.mark.parametrize("poison", [np.nan, 1e30])
@pytest.mark.parametrize("sizes", [SIZES["plain"], SIZES["grouped"]], ids=["plain", "grouped"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_its_slot_is_a_rows(implementation: str, sizes: Sizes, poison: float) -> None:
    """What lies in nobody's slot and in rows of padding reaches nothing, and stays."""
    x = call(sizes, drafts=4)
    clean = compiled(kda_draft, implementation)(*x.tokens, x.layer, x.states, x.windows, slots=SLOTS)
    states, windows, tokens = x.states.copy(), x.windows.copy(), each(np.copy, x.tokens)
    states[OTHERS], windows[OTHERS] = poison, poison
    for array in tokens:
        array[1] = poison
    bad = Call(tokens, x.layer, states, windows)
    for want, got in zip(
        clean, compiled(kda_draft, implementation)(*tokens, x.layer, states, windows, slots=SLOTS)
    ):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got[1], 0)

    step = compiled(kda_decode, implementation)
    out, *pools = step(*bad.at(0), x.layer, states, windows, slots=SLOTS)
    want, *untouched = step(*x.at(0), x.layer, x.states, x.windows, slots=SLOTS)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(out[1], 0)
    for pool, before, clean_pool in zip(pools, (states, windows), untouched):
        np.testing.assert_array_equal(np.asarray(pool)[OTHERS], before[OTHERS])
        np.testing.assert_array_equal(np.asarray(pool)[SLOTS[LIVE]], np.asarray(clean_pool)[SLOTS[LIVE]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_slots_rows_have_their_own(implementation: str) -> None:
    x = call(SIZES["grouped"], drafts=4)
    for operator, tokens in ((kda_decode, x.at(0)), (kda_draft, x.tokens)):
        run = compiled(operator, implementation)
        want = run(*tokens, x.layer, x.states, x.windows, slots=np.arange(3))
        got = run(*tokens, x.layer, x.states[:3], x.windows[:3])
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            assert_close(f"{operator.__name__} {i}", a[:3], b, 1e-6)


@pytest.mark.parametrize("slots", [None, np.array([3, -1, 0])], ids=["rows", "slots"])
def test_as_many_drafts_count_as_are_accepted(slots: NDArray | None) -> None:
    random = np.random.default_rng(0)
    shapes = ((3, 2, 4, 5), (3, 3, 6))
    size = 3 if slots is None else 4
    pools = [random.standard_normal((size, *shape[1:])).astype(np.float32) for shape in shapes]
    after = [random.standard_normal((3, 3, *shape[1:])).astype(np.float32) for shape in shapes]
    accept = jax.jit(kda_accept)
    for accepted in ([0, 0, 0], [1, 2, 3], [3, 1, 0], [2, 3, 2], [0, 3, 1]):
        got = accept(*pools, *after, np.array(accepted), slots=slots)
        for pool, kept, new in zip(pools, after, got):
            want = pool.copy()
            for row, count in enumerate(accepted):
                slot = row if slots is None else slots[row]
                if count and slot >= 0:
                    want[slot] = kept[row, count - 1]
            np.testing.assert_array_equal(new, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_accepted_drafts_are_the_tokens_they_were(implementation: str) -> None:
    x = call(SIZES["grouped"], drafts=4)
    run = compiled(kda_draft, implementation)
    _, after_states, after_windows = run(*x.tokens, x.layer, x.states, x.windows, slots=SLOTS)
    states, windows = kda_accept(x.states, x.windows, after_states, after_windows, [2, 3, 0], slots=SLOTS)
    pools: Any = (x.states, x.windows)
    for m in range(2):
        _, *pools = compiled(kda_decode, implementation)(
            *x.at(m), x.layer, *pools, slots=np.array([4, -1, -1])
        )
    assert_close("states", pools[0], states, 1e-6)
    np.testing.assert_array_equal(windows, pools[1])


@pytest.mark.parametrize(
    "implementation, bound, gate",
    [
        ("reference", 3e-3, "softplus"),
        ("xla", 5e-3, "softplus"),
        ("xla", 5e-3, "bounded"),
        ("triton-interpret", 3e-3, "softplus"),
        ("triton-interpret", 3e-3, "bounded"),
    ],
)
def test_half_inputs_cost_what_halves_cost(implementation: str, bound: float, gate: str) -> None:
    """Plain JAX rounds between the operators too, as the layer does that is made of them."""
    x = call(Sizes(2, 4, 32, 64), drafts=3, dtype=jnp.bfloat16, seed=1)
    run = compiled(kda_draft, implementation, GATES[gate])
    out, states, windows = run(*x.tokens, x.layer, x.states, x.windows, slots=SLOTS)
    assert (out.dtype, states.dtype, windows.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    wanted = [by_hand(x, row, SLOTS[row], GATES[gate]) for row in LIVE]
    for name, got, column in zip(("out", "states", "windows"), (out, states, windows), range(3)):
        want = np.stack([w[column] for w in wanted])
        assert_close(name, want, got[LIVE,], bound if column < 2 else 1e-9)


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gate", GATES)
def test_plain_jax_has_the_bits_of_the_operators_it_is_made_of(gate: str, dtype: DTypeLike) -> None:
    x = call(Sizes(2, 4, 32, 16), size=3, dtype=dtype)

    @jax.jit
    def one_by_one(mixed, decay, beta, opening, layer, states, windows):
        g = kda_gate(decay, layer.A_log, layer.dt_bias, lower_bound=GATES[gate])
        y, windows = short_conv_step(mixed, layer.conv, windows)
        q, k, v = jnp.split(y, (64, 128), axis=-1)
        q, k, v = (a.reshape(3, -1, channels) for a, channels in ((q, 32), (k, 32), (v, 16)))
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        out, states = kda_step(q, k, v, g, beta, states, qk_l2norm=True)
        return rms_norm_gated(out, opening, layer.norm, eps=EPS), states, windows

    want = one_by_one(*map(jnp.asarray, x.at(0)), x.layer, x.states, x.windows)
    got = compiled(kda_decode, "xla", GATES[gate])(*x.at(0), x.layer, x.states, x.windows)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_queries_are_scaled(implementation: str) -> None:
    """The output's norm hides a scale, up to its eps."""
    x = call(SIZES["plain"], size=3)
    run = functools.partial(kda_decode, *x.at(0), x.layer, x.states, x.windows, implementation=implementation)
    usual, larger = run(eps=1e-5)[0], run(eps=1e-5 * 16, scale=1.0)[0]
    assert_close("out", usual, larger, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation: str) -> None:
    x = call(SIZES["plain"], rows=0, drafts=2)
    none = np.zeros(0, np.int32)
    options: dict[str, Any] = dict(eps=EPS, slots=none, implementation=implementation)
    out, states, windows = kda_decode(*x.at(0), x.layer, x.states, x.windows, **options)
    assert out.shape == (0, 2, 24)
    np.testing.assert_array_equal(states, x.states)
    np.testing.assert_array_equal(windows, x.windows)
    out, states, windows = kda_draft(*x.tokens, x.layer, x.states, x.windows, **options)
    assert (out.shape, states.shape, windows.shape) == ((0, 2, 2, 24), (0, 2, 2, 16, 24), (0, 2, 3, 112))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mixed=np.zeros((3, 1, 112), np.float32)), r"mixed must be \[B, C\], got \(3, 1, 112\)"),
        (
            dict(mixed=np.zeros((3, 111), np.float32)),
            "C = 2 H K .* HV=2, K=16, V=24 of the states, got C=111",
        ),
        (dict(decay=np.zeros((3, 2, 15), np.float32)), r"decay must be \[B, HV, K\] = \(3, 2, 16\), got"),
        (dict(beta=np.zeros((3, 1), np.float32)), r"beta must be \[B, HV\] = \(3, 2\), got"),
        (dict(gate=np.zeros((3, 2, 23), np.float32)), r"gate must be \[B, HV, V\] = \(3, 2, 24\), got"),
        (
            dict(windows=np.zeros((6, 2, 112), np.float32)),
            r"windows must be \[S, W-1, C\] = \(6, 3, 112\), got",
        ),
        (dict(states=np.zeros((6, 2, 16, 24), np.float16)), "states must be .* in float32, got .* float16"),
        (dict(slots=None), "states are those of B=3 rows without slots, got 6"),
        (dict(slots=[0, 1]), r"slots must be int32 of shape \[3\], got \[2\]"),
        (dict(slots=[0, 6, -1]), r"slots must be below S=6 and none twice, got \[0, 6, -1\]"),
        (dict(slots=[2, 2, -1]), r"none twice, got \[2, 2, -1\]"),
        (dict(lower_bound=5.0), "lower_bound=5.0 must be negative"),
        (dict(implementation="cuda"), "unknown implementation='cuda'"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_bad_calls_say_what_was_wrong(change: dict[str, Any], message: str) -> None:
    x = call(SIZES["plain"])
    mixed, decay, beta, gate = x.at(0)
    given: dict[str, Any] = dict(mixed=mixed, decay=decay, beta=beta, gate=gate, layer=x.layer, slots=SLOTS)
    given |= dict(states=x.states, windows=x.windows, eps=EPS)
    with pytest.raises(ValueError, match=message):
        kda_decode(**given | change)


def test_bad_parameters_and_drafts_say_what_was_wrong() -> None:
    x = call(SIZES["plain"], drafts=2)
    for name, bad, message in (
        ("A_log", jnp.zeros(3), r"layer.A_log must be \[HV\] = \(2,\), got \(3,\)"),
        ("conv", jnp.zeros((4, 5)), r"layer.conv must be \[W, C\] = \(4, 112\), got \(4, 5\)"),
        ("dt_bias", jnp.zeros(32), r"layer.dt_bias must be \[HV, K\] = \(2, 16\), got \(32,\)"),
        ("norm", jnp.zeros(16), r"layer.norm must be \[V\] = \(24,\), got \(16,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            layer = x.layer._replace(**{name: bad})
            kda_draft(*x.tokens, layer, x.states, x.windows, slots=SLOTS, eps=EPS)
    with pytest.raises(ValueError, match=r"kda_draft: mixed must be \[B, M, C\], got \(3, 112\)"):
        kda_draft(*x.at(0), x.layer, x.states, x.windows, slots=SLOTS, eps=EPS)
    with pytest.raises(ValueError, match="kda_draft: needs a token a row at least, got M=0"):
        kda_draft(*each(lambda a: a[:, :0], x.tokens), x.layer, x.states, x.windows, slots=SLOTS, eps=EPS)
    _, *after = kda_draft(*x.tokens, x.layer, x.states, x.windows, slots=SLOTS, eps=EPS)
    with pytest.raises(ValueError, match=r"accepted must lie in 0\.\.2, got \[0, 3, 1\]"):
        kda_accept(x.states, x.windows, after[0], after[1], [0, 3, 1], slots=SLOTS)
    with pytest.raises(ValueError, match=r"after_windows must be \[B, M, ...\] = \(3, 2, 3, 112\), got"):
        kda_accept(x.states, x.windows, after[0], after[1][:, :1], [0, 0, 0], slots=SLOTS)
    with pytest.raises(ValueError, match="states are those of B=3 rows without slots, got 6"):
        kda_accept(x.states, x.windows, after[0], after[1], [0, 0, 0])


def test_the_kernel_refuses_with_its_reason() -> None:
    run = functools.partial(kda_decode, slots=SLOTS, eps=EPS, implementation="triton-interpret")
    x = call(SIZES["plain"])
    with pytest.raises(ValueError, match="keeps windows in the dtype of mixed, float32, got bfloat16"):
        run(*x.at(0), x.layer, x.states, jnp.asarray(x.windows, jnp.bfloat16))
    one = x.layer._replace(conv=x.layer.conv[:1])
    with pytest.raises(ValueError, match="needs a window, got a convolution of one tap"):
        run(*x.at(0), one, x.states, x.windows[:, :0])
    with jax.enable_x64(True), pytest.raises(ValueError, match="computes in float32, got float64 states"):
        run(*x.at(0), x.layer, x.states.astype(np.float64), x.windows)
