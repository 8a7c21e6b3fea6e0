"""Compressed states: the scale and the rounding to the bit, the bound, once and never again, what is not a number."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowering import CALL, lowered
from pallas_kernels import CompressedState, compress_state, decompress_state

EACH = pytest.mark.parametrize("implementation", ["xla", "triton-interpret", "tpu-interpret"])


@functools.cache
def compiled(function, implementation: str):
    return jax.jit(functools.partial(function, implementation=implementation))


def both_ways(state: np.ndarray, implementation: str) -> tuple[CompressedState, np.ndarray]:
    """What becomes of a state, and what comes back."""
    small = compiled(compress_state, implementation)(state)
    back = compiled(decompress_state, implementation)(small)
    return jax.tree.map(np.asarray, small), np.asarray(back)


def by_hand(state: np.ndarray) -> CompressedState:
    """In float64, where 17 bits times 7 and a quotient's ties are exact."""
    wide = state.astype(np.float64)
    fraction, exponent = np.frexp(np.abs(wide).max(axis=-1) / 127)
    scales = np.ldexp(np.ceil(np.ldexp(fraction, 17)), exponent - 17)
    values = np.rint(wide / np.where(scales == 0, 1, scales)[..., None])
    return CompressedState(jnp.asarray(values, jnp.int8), jnp.asarray(scales, jnp.float32))


def states(*shape: int, seed: int = 0) -> np.ndarray:
    """Random numbers whose rows' sizes differ by many powers of two."""
    random = np.random.default_rng(seed)
    sizes = np.exp2(random.uniform(-60, 60, shape[:-1]))
    return (random.standard_normal(shape) * sizes[..., None]).astype(np.float32)


def same(want: CompressedState, got: CompressedState) -> None:
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@EACH
@pytest.mark.parametrize("shape", [(3, 40, 33), (1, 1, 1, 2, 1), (9, 5, 200)], ids=str)
def test_every_backend_has_the_bits_of_exact_arithmetic(shape: tuple[int, ...], implementation: str) -> None:
    state = states(*shape)
    small, back = both_ways(state, implementation)
    same(by_hand(state), small)
    want = small.values.astype(np.float64) * small.scales[..., None]
    np.testing.assert_array_equal(back, want)  # float64 against float32: nothing was rounded
    assert (np.abs(state.astype(np.float64) - want) <= small.scales[..., None].astype(np.float64) / 2).all()


@EACH
def test_a_scale_is_the_next_of_17_bits(implementation: str) -> None:
    random = np.random.default_rng(1)
    scales = np.ldexp(random.integers(1 << 16, 1 << 17, 500), random.integers(-80, 60, 500))
    exact = (127 * scales).astype(np.float32)
    up, down = (np.nextafter(exact, np.float32(to)) for to in (np.inf, 0))
    largest = np.concatenate([exact, up, down, -exact])
    small, _ = both_ways(largest.reshape(2, -1, 1), implementation)
    got = small.scales.reshape(4, -1).astype(np.float64)
    np.testing.assert_array_equal(got[0], scales)
    np.testing.assert_array_equal(got[1], by_hand(up[:, None]).scales)
    assert (got[1] > scales).all()
    np.testing.assert_array_equal(got[2], scales)
    np.testing.assert_array_equal(got[3], scales)


@EACH
def test_ties_go_to_even_and_their_neighbours_do_not(implementation: str) -> None:
    for scale in (1.0, 0.75, 1 + 2.0**-16, 2.0**40 - 2.0**24):
        ties = (np.arange(-127, 127) + 0.5) * scale
        for value in (
            ties,
            np.nextafter(ties.astype(np.float32), 0),
            np.nextafter(ties.astype(np.float32), 1e38),
        ):
            state = np.append(value, 127 * scale).astype(np.float32).reshape(1, 1, -1)
            small, _ = both_ways(state, implementation)
            assert small.scales[0, 0] == np.float32(scale)
            same(by_hand(state), small)


@EACH
def test_what_was_compressed_once_stays_as_it_is(implementation: str) -> None:
    state = states(4, 64, 128, seed=2)
    small, back = both_ways(state, implementation)
    again, same_back = both_ways(back, implementation)
    same(small, again)
    np.testing.assert_array_equal(back, same_back)


@EACH
def test_zeros_and_what_is_all_but_zero(implementation: str) -> None:
    state = states(1, 6, 8)
    state[0, 0], state[0, 1] = 0, -0.0
    state[0, 2] = 1e-45
    state[0, 3] = np.nextafter(np.float32(127 * 2.0**-100), np.float32(0)) / 2  # below the smallest scale
    state[0, 4] = 127 * 2.0**-100  # it itself
    small, back = both_ways(state, implementation)
    assert (small.scales[0, :4] == 0).all() and (small.values[0, :4] == 0).all() and (back[0, :4] == 0).all()
    assert (np.abs(state[0, 3]) < 1.1e-28).all()
    np.testing.assert_array_equal(back[0, 4], state[0, 4])
    again, _ = both_ways(back, implementation)
    same(small, again)


@EACH
def test_what_is_not_finite_never_turns_into_numbers(implementation: str) -> None:
    state = states(2, 5, 16, seed=3)
    clean, kept = both_ways(state, implementation)
    most = np.float32(127 * 2.0**120)
    for row, wrong in enumerate([np.nan, np.inf, -np.inf, np.nextafter(most, np.float32(np.inf))]):
        state[1, row, 3 * row] = wrong
    state[0, 0, 7] = np.nextafter(most, np.float32(0))
    small, back = both_ways(state, implementation)
    assert np.isnan(back[1, :4]).all() and np.isnan(small.scales[1, :4]).all()
    assert np.isfinite(back[0, 0]).all() and abs(back[0, 0, 7] - state[0, 0, 7]) <= small.scales[0, 0] / 2
    for a, b in ((clean.values, small.values), (clean.scales, small.scales), (kept, back)):
        np.testing.assert_array_equal(a[0, 1:], b[0, 1:])
        np.testing.assert_array_equal(a[1, 4], b[1, 4])
    again, _ = both_ways(back, implementation)
    same(small, again)


@EACH
@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_no_numbers(shape: tuple[int, ...], implementation: str) -> None:
    small, back = both_ways(np.zeros(shape, np.float32), implementation)
    assert small.values.shape == back.shape == shape and small.scales.shape == shape[:-1]
    assert (small.values.dtype, small.scales.dtype, back.dtype) == (np.int8, np.float32, np.float32)
    assert (small.scales == 0).all()


@pytest.mark.parametrize("shape", [(4, 2, 128, 128), (4, 20, 80)], ids=str)
@pytest.mark.parametrize("platform, implementation", [("cuda", "triton"), ("tpu", "tpu")])
def test_each_way_is_one_kernel(platform: str, implementation: str, shape: tuple[int, ...]) -> None:
    state = jax.ShapeDtypeStruct(shape, jnp.float32)
    small = jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    text = lowered(platform, functools.partial(compress_state, implementation=implementation), state)
    assert text.count(CALL[platform]) == 1 and "compress_state" in text
    text = lowered(
        platform,
        lambda *x: decompress_state(CompressedState(*x), implementation=implementation),
        *small,
    )
    assert text.count(CALL[platform]) == 1 and "decompress_state" in text


@pytest.mark.parametrize(
    "state, options, message",
    [
        (jnp.zeros((4, 4)), {}, r"\[..., H, K, V\], got float32 \[4, 4\]"),
        (jnp.zeros((2, 4, 4), jnp.bfloat16), {}, "got bfloat16"),
        (jnp.zeros((1, 1, 4097)), {"implementation": "triton"}, "at most 4096 value channels, got V=4097"),
        (jnp.zeros((1, 512, 512)), {"implementation": "tpu"}, "at most 65536 numbers, got K=512, V=512"),
        (jnp.zeros((2, 4, 4)), {"implementation": "cuda"}, "compress_state: unknown"),
    ],
    ids=["shape", "dtype", "wide rows", "large heads", "name"],
)
def test_says_what_is_wrong(state: jax.Array, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compress_state(state, **options)


def test_a_gpu_counts_places_in_32_bits() -> None:
    run = functools.partial(compress_state, implementation="triton")
    shape = (1024, 128, 128, 128)
    with pytest.raises(ValueError, match="at most 2147483647 numbers a call, got 2147483648"):
        jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize(
    "values, scales, message",
    [
        (jnp.zeros((2, 4, 4)), jnp.zeros((2, 4)), "int8 values .*, got float32"),
        (jnp.zeros((4, 4), jnp.int8), jnp.zeros((4,)), r"got int8 \[4, 4\]"),
        (
            jnp.zeros((2, 4, 4), jnp.int8),
            jnp.zeros((2, 4, 1)),
            r"scales \[2, 4\] beside .*, got float32 \[2, 4, 1\]",
        ),
        (jnp.zeros((2, 4, 4), jnp.int8), jnp.zeros((2, 4), jnp.bfloat16), "got bfloat16"),
    ],
    ids=["values", "rank", "scales' shape", "scales' dtype"],
)
def test_says_what_is_wrong_on_the_way_back(values: jax.Array, scales: jax.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decompress_state(CompressedState(values, scales))
