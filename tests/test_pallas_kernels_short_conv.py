"""The short convolution: definition, splits to the bit, packs, padding, windows, gradients."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowering import CALL, lowered
from measure import assert_close
from pallas_kernels import short_conv, short_conv_step

CHANNELS = 19  # no multiple of a vector register
TAPS = 4
KERNELS = ["triton-interpret", "tpu-interpret"]
EACH = pytest.mark.parametrize("implementation", ["reference", "xla", *KERNELS])
# A kernel's body fixes its order of sums, whatever XLA makes of the program around it.
BITS = [pytest.param(name, marks=pytest.mark.optimised) for name in ("reference", "xla")]
EACH_TO_THE_BIT = pytest.mark.parametrize("implementation", [*BITS, *KERNELS])
PACKS_TO_THE_BIT = pytest.mark.parametrize(
    "implementation", [*BITS, "triton-interpret"]
)  # a TPU's takes none


def inputs(
    num_tokens: int, rows: int = 1, seed: int = 0, taps: int = TAPS, channels: int = CHANNELS
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (rows, num_tokens, channels), (taps, channels), (rows, taps - 1, channels)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def by_hand(x: np.ndarray, weight: np.ndarray, window: np.ndarray) -> np.ndarray:
    """One row in float64 NumPy."""
    history = np.concatenate([window, x]).astype(np.float64)
    total = np.stack([(weight * history[t : t + len(weight)]).sum(0) for t in range(len(x))])
    return total / (1 + np.exp(-total))


conv = jax.jit(short_conv, static_argnames=("activation", "implementation"))
step = jax.jit(short_conv_step)


@pytest.mark.parametrize(
    "implementation, num_tokens",
    [(name, tokens) for name in ("reference", "xla") for tokens in (1, 2, 3, 9)]
    + [(name, tokens) for name in KERNELS for tokens in (1, 9)],
)
def test_matches_the_formula(implementation: str, num_tokens: int) -> None:
    x, weight, window = inputs(num_tokens, rows=2)
    y, end = conv(x, weight, window, implementation=implementation)
    for b in range(2):
        assert_close("y", by_hand(x[b], weight, window[b]), y[b], 2e-7)
        np.testing.assert_array_equal(end[b], np.concatenate([window[b], x[b]])[-(TAPS - 1) :])
    linear, _ = conv(x, weight, window, activation=None, implementation=implementation)
    assert_close("silu", by_hand(x[1], weight, window[1]), jax.nn.silu(linear[1]), 2e-7)


@pytest.mark.parametrize(
    "implementation, cu_seqlens",
    [(name, None) for name in ("reference", "xla", *KERNELS)]
    + [(name, [0, 0]) for name in ("reference", "xla", "triton-interpret")],
    ids=lambda value: "pack" if isinstance(value, list) else value or "rows",
)
def test_no_tokens_leave_the_window(implementation: str, cu_seqlens: list[int] | None) -> None:
    x, weight, window = map(jnp.asarray, inputs(0))
    y, end, at = short_conv(
        x, weight, window, cu_seqlens=cu_seqlens, boundaries=[0], implementation=implementation
    )
    assert y.shape == (1, 0, CHANNELS)
    np.testing.assert_array_equal(end, window)
    np.testing.assert_array_equal(at[:, 0], window)


@pytest.mark.parametrize("num_taps, channels", [(1, 5), (2, 1), (8, 130)])
@pytest.mark.parametrize("implementation", KERNELS)
def test_any_number_of_taps_and_channels(implementation: str, num_taps: int, channels: int) -> None:
    x, weight, window = inputs(21, rows=2, taps=num_taps, channels=channels)
    lengths, marks = np.array([21, 3]), np.array([0, 1, 20])
    want = conv(x, weight, window, lengths=lengths, boundaries=marks)
    got = conv(x, weight, window, lengths=lengths, boundaries=marks, implementation=implementation)
    assert_close("y", by_hand(x[0], weight, window[0]), got[0][0], 3e-7)
    assert_close("y", by_hand(x[1, :3], weight, window[1]), got[0][1, :3], 3e-7)
    for a, b in zip(want[1:], got[1:], strict=True):
        np.testing.assert_array_equal(a, b)


CUTS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127]


@pytest.mark.parametrize(
    "implementation, tokens, cut",
    [pytest.param("xla", 130, cut, marks=pytest.mark.optimised) for cut in CUTS]
    + [("triton-interpret", 130, cut) for cut in (1, 16, 65)]
    + [("tpu-interpret", 600, cut) for cut in (1, 256, 300)],  # a block has 256
)
def test_split_keeps_every_bit(implementation: str, tokens: int, cut: int) -> None:
    x, weight, window = inputs(tokens)
    run = functools.partial(conv, implementation=implementation)
    whole, end = run(x, weight, window)
    head, middle = run(x[:, :cut], weight, window)
    tail, split_end = run(x[:, cut:], weight, middle)
    np.testing.assert_array_equal(jnp.concatenate([head, tail], axis=1), whole)
    np.testing.assert_array_equal(split_end, end)


@pytest.mark.optimised
def test_steps_are_a_prefill_to_the_bit() -> None:
    x, weight, window = inputs(9, rows=2)
    whole, end = conv(x, weight, window)
    state = jnp.asarray(window)
    for t in range(9):
        y, state = step(x[:, t], weight, state)
        np.testing.assert_array_equal(y, whole[:, t])
    np.testing.assert_array_equal(state, end)


@EACH_TO_THE_BIT
def test_padding_is_never_read_and_gives_zero(implementation: str) -> None:
    x, weight, window = inputs(8, rows=5)
    weight[0, 3] = np.inf  # no padding times this either
    lengths = np.array([0, 1, 2, 5, 8], np.int32)
    dirty = x.copy()
    for b, length in enumerate(lengths):
        dirty[b, length:] = np.nan
    boundaries = np.array([0, 2, 8])
    y, end, marks = conv(
        dirty, weight, window, lengths=lengths, boundaries=boundaries, implementation=implementation
    )
    for b, length in enumerate(lengths):
        history = np.concatenate([window[b], x[b]])
        np.testing.assert_array_equal(y[b, length:], 0)
        np.testing.assert_array_equal(end[b], history[length : length + TAPS - 1])
        for i, count in enumerate(boundaries):
            at = min(count, length)
            np.testing.assert_array_equal(marks[b, i], history[at : at + TAPS - 1])
        if length:
            alone, _ = conv(x[b : b + 1, :length], weight, window[b : b + 1], implementation=implementation)
            np.testing.assert_array_equal(y[b, :length], alone[0])


PACKS = {
    "one token in the middle": [0, 5, 6, 13],
    "empty first, middle and last": [0, 0, 2, 2, 2, 9, 9],
    "all short, padding behind": [0, 1, 2, 3, 5],
    "nothing at all": [0, 0],
}


@PACKS_TO_THE_BIT
@pytest.mark.parametrize("cu", PACKS.values(), ids=PACKS.keys())
def test_a_pack_is_its_sequences(cu: list[int], implementation: str) -> None:
    num = len(cu) - 1
    x, weight, _ = inputs(13)
    window = inputs(1, rows=num, seed=1)[2]
    dirty = x.copy()
    dirty[:, cu[-1] :] = np.nan
    counts = np.stack([np.arange(num) % 3, np.full(num, 13)], axis=1)
    y, ends, marks = conv(
        dirty, weight, window, cu_seqlens=np.array(cu), boundaries=counts, implementation=implementation
    )
    np.testing.assert_array_equal(y[:, cu[-1] :], 0)
    for n, (first, last) in enumerate(itertools.pairwise(cu)):
        history = np.concatenate([window[n], x[0, first:last]])
        np.testing.assert_array_equal(ends[n], history[last - first :])
        at = min(n % 3, last - first)
        np.testing.assert_array_equal(marks[n, 0], history[at : at + TAPS - 1])
        np.testing.assert_array_equal(marks[n, 1], ends[n])
        if last > first:
            alone, _ = conv(x[:, first:last], weight, window[n : n + 1], implementation=implementation)
            np.testing.assert_array_equal(y[0, first:last], alone[0])


@PACKS_TO_THE_BIT
def test_a_sequence_keeps_what_is_wrong_to_itself(implementation: str) -> None:
    """Its tokens and its window; beside it lie an empty one, one shorter than a window, and a longer one."""
    x, weight, _ = inputs(13)
    window, cu, sick = inputs(1, rows=5, seed=1)[2], np.array([0, 5, 5, 9, 11, 13]), 2
    tokens = (np.arange(13) >= 5) & (np.arange(13) < 9)
    results = []
    for number in (0.0, np.nan):
        x[:, tokens], window[sick] = number, number
        y, *windows = conv(
            x, weight, window, cu_seqlens=cu, boundaries=np.array([0, 2]), implementation=implementation
        )
        results.append((y[:, ~tokens], *(np.delete(w, sick, 0) for w in windows)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()


@pytest.mark.parametrize(
    "implementation, layout",
    [(name, layout) for name in ("xla", *KERNELS) for layout in ("plain", "lengths")]
    + [(name, "packed") for name in ("xla", "triton-interpret")],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 6])
def test_gradients_match_float64(implementation: str, num_tokens: int, layout: str) -> None:
    rows = 1 if layout == "packed" else 2
    x, weight, window = inputs(num_tokens, rows=rows)
    options = {
        "plain": {},
        "lengths": {"lengths": [num_tokens, num_tokens - 1]},
        "packed": {"cu_seqlens": [0, 0, num_tokens - 1, num_tokens]},
    }[layout]
    if layout == "packed":
        window = inputs(1, rows=3, seed=2)[2]
    shapes = x.shape, window.shape, (len(window), 2, *window.shape[1:])
    cotangents = [np.random.default_rng(3).standard_normal(shape) for shape in shapes]

    def loss(implementation, *args):
        outputs = short_conv(*args, boundaries=[0, 1], implementation=implementation, **options)
        return sum((o * c.astype(o.dtype)).sum() for o, c in zip(outputs, cotangents))

    gradient = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    got = gradient(implementation, x, weight, window)
    with jax.enable_x64(True):
        exact = gradient("reference", *(jnp.asarray(a, jnp.float64) for a in (x, weight, window)))
        exact = [np.asarray(a) for a in exact]
    for name, reference, mine in zip(["dx", "dweight", "dwindow"], exact, got):
        assert_close(name, reference, mine, 1e-6)


@EACH
def test_bfloat16_sums_in_float32(implementation: str) -> None:
    x, weight, window = (jnp.asarray(a, jnp.bfloat16) for a in inputs(9))
    run = functools.partial(conv, implementation=implementation)
    y, end = run(x, weight, window)
    wide, _ = run(*(a.astype(jnp.float32) for a in (x, weight, window)))
    assert y.dtype == end.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))


@EACH
def test_windows_keep_their_dtype(implementation: str) -> None:
    x, weight, window = map(jnp.asarray, inputs(5))
    y, end, at = conv(
        x.astype(jnp.bfloat16), weight, window, boundaries=np.array([1]), implementation=implementation
    )
    assert y.dtype == jnp.bfloat16 and end.dtype == at.dtype == jnp.float32
    history = jnp.concatenate([window[0], x[0].astype(jnp.bfloat16).astype(jnp.float32)])
    np.testing.assert_array_equal(end[0], history[5:])
    np.testing.assert_array_equal(at[0, 0], history[1:4])


@pytest.mark.parametrize("boundaries", [None, [3, 100]], ids=["whole", "boundaries"])
@pytest.mark.parametrize(
    "platform, implementation, layout",
    [("cuda", "triton", layout) for layout in ("rows", "lengths", "pack")]
    + [("tpu", "tpu", layout) for layout in ("rows", "lengths")],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_it_is_one_kernel(
    platform: str, implementation: str, dtype: jnp.dtype, layout: str, boundaries: list[int] | None
) -> None:
    options = {"rows": {}, "lengths": {"lengths": [192]}, "pack": {"cu_seqlens": [0, 100, 192]}}[layout]
    sequences = 2 if layout == "pack" else 1
    shapes = (1, 192, 384), (TAPS, 384), (sequences, TAPS - 1, 384)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return short_conv(*arrays, boundaries=boundaries, implementation=implementation, **options)

    text = lowered(platform, run, *arrays)
    assert text.count(CALL[platform]) == 1 and "short_conv" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": jnp.zeros((1, 4, CHANNELS))}, "W-1"),
        ({"weight": jnp.zeros((4, 3))}, "weight"),
        ({"activation": "gelu"}, "gelu"),
        ({"lengths": [9]}, "0..8"),
        ({"lengths": [1], "cu_seqlens": [0, 8]}, "without lengths"),
        ({"cu_seqlens": [0, 9]}, "at most 8"),
        ({"boundaries": [9]}, "0..8"),
        ({"implementation": "cuda"}, "reference"),
        ({"implementation": "triton", "weight": jnp.zeros((9, CHANNELS))}, "up to 8 taps, got W=9"),
        ({"implementation": "tpu", "cu_seqlens": [0, 8]}, "no packs"),
        ({"implementation": "triton", "x": jnp.zeros((1, 8, CHANNELS), jnp.float16)}, "got float16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_says_what_is_wrong(change: dict, message: str) -> None:
    x, weight, _ = map(jnp.asarray, inputs(8))
    with pytest.raises(ValueError, match=message):
        short_conv(**(dict[str, Any](x=x, weight=weight) | change))
