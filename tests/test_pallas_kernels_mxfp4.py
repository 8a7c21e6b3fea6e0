"""MXFP4: what the codes and scales mean, and products with matrices that stay packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from measure import assert_close
from pallas_kernels import Mxfp4, SituGlu, expert_mlp, unpack_mxfp4

WIDTH, INNER, EXPERTS, SLOTS = 32, 64, 5, 2
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def by_hand(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """One number after the other, in float64."""
    numbers = np.zeros((*packed.shape[:-1], 2 * packed.shape[-1]))
    for place in np.ndindex(*numbers.shape):
        *row, column = place
        byte = int(packed[(*row, column // 2)])
        code = byte // 16 if column % 2 else byte % 16
        number = -MAGNITUDES[code - 8] if code >= 8 else MAGNITUDES[code]
        numbers[place] = number * 2.0 ** (int(scale[(*row, column // 32)]) - 127)
    return numbers


def packed_matrices(rng: np.random.Generator, *shape: int) -> Mxfp4:
    *rows, columns = shape
    packed = rng.integers(0, 256, (*rows, columns // 2), dtype=np.uint8)
    return Mxfp4(jnp.asarray(packed), jnp.asarray(rng.integers(122, 127, (*rows, columns // 32), np.uint8)))


def test_every_code_and_the_scales_mean_what_the_format_says() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32) * 4 + np.arange(2, dtype=np.uint8)[:, None] * 3
    scale = np.array([[1, 127], [128, 250]], np.uint8)
    want = by_hand(codes, scale)
    for dtype in (jnp.float32, jnp.bfloat16):
        got = unpack_mxfp4(Mxfp4(jnp.asarray(codes), jnp.asarray(scale)), dtype)
        assert got.dtype == dtype
        normal = np.where(np.abs(want) < 2.0**-126, 0, want)
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), normal)


def test_all_sixteen_codes() -> None:
    pairs = np.array([low + 16 * high for low, high in zip(range(16), reversed(range(16)))], np.uint8)[None]
    got = unpack_mxfp4(Mxfp4(jnp.asarray(pairs), jnp.full((1, 1), 127, jnp.uint8)))[0]
    both = [*MAGNITUDES, *(-x for x in MAGNITUDES)]
    np.testing.assert_array_equal(got[0::2], both)
    np.testing.assert_array_equal(got[1::2], both[::-1])


mix = jax.jit(expert_mlp, static_argnames=("activation", "implementation"))


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_packed_experts_are_their_numbers(num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    gate_up = packed_matrices(rng, EXPERTS, 2 * INNER, WIDTH)
    down = packed_matrices(rng, EXPERTS, WIDTH, INNER)
    x = rng.standard_normal((num_tokens, WIDTH)).astype(np.float32)
    ids = np.argsort(rng.random((num_tokens, EXPERTS)), axis=1)[:, :SLOTS].astype(np.int32)
    weights = rng.standard_normal((num_tokens, SLOTS)).astype(np.float32)
    plain = [by_hand(*map(np.asarray, m)).swapaxes(1, 2).astype(np.float32) for m in (gate_up, down)]
    activation = SituGlu(4.0, 25.0)
    want = mix(x, ids, weights, *plain, activation=activation, implementation="reference")
    for implementation in ("reference", "xla"):
        got = mix(x, ids, weights, gate_up, down, activation=activation, implementation=implementation)
        assert_close(implementation, want, got, 1e-6)


@pytest.mark.optimised
def test_a_row_through_packed_experts_keeps_its_bits_whatever_stands_around_it() -> None:
    rng = np.random.default_rng(0)
    gate_up = packed_matrices(rng, EXPERTS, 2 * INNER, WIDTH)
    down = packed_matrices(rng, EXPERTS, WIDTH, INNER)
    x = rng.standard_normal((400, WIDTH)).astype(np.float32)
    ids = np.argsort(rng.random((400, EXPERTS)), axis=1)[:, :SLOTS].astype(np.int32)
    weights = rng.standard_normal((400, SLOTS)).astype(np.float32)
    whole = mix(x, ids, weights, gate_up, down)
    for part in (slice(0, 64), slice(133, 300), slice(380, 400)):
        np.testing.assert_array_equal(mix(x[part], ids[part], weights[part], gate_up, down), whole[part])


def test_situ_glu_is_its_formula_and_bounded() -> None:
    gate, up = np.random.default_rng(0).normal(0, 30, (2, 200))
    want = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    got = SituGlu(4.0, 25.0)(jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    assert_close("y", want, got, 1e-6)
    assert 90 < float(jnp.abs(got).max()) <= 100
    half = SituGlu(4.0, 25.0)(jnp.asarray(gate, jnp.bfloat16), jnp.asarray(up, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert_close("in float32 inside", want, half, 5e-3)
    assert SituGlu(4.0, 25.0) == SituGlu(4.0, 25.0) and hash(SituGlu(4.0, 25.0)) == hash(SituGlu(4.0, 25.0))


def _spoiled(packed: tuple[int, ...], scale: tuple[int, ...], dtype: type = jnp.uint8) -> Mxfp4:
    return Mxfp4(jnp.zeros(packed, dtype), jnp.zeros(scale, jnp.uint8))


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (_spoiled((3, 16), (3, 2)), r"scale \(3, 1\), got \(3, 2\)"),
        (_spoiled((3, 24), (3, 1)), "multiple of 32"),
        (_spoiled((3, 16), (3, 1), jnp.int8), "must be uint8, got int8"),
    ],
    ids=["scale", "width", "dtype"],
)
def test_says_what_does_not_fit(matrices: Mxfp4, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_mxfp4(matrices)


def test_refuses_packed_experts_of_other_sizes_and_their_gradient() -> None:
    rng = np.random.default_rng(0)
    gate_up, down = packed_matrices(rng, 2, 2 * INNER, WIDTH), packed_matrices(rng, 2, WIDTH, INNER)
    x, ids, weights = jnp.ones((3, WIDTH)), jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1))
    with pytest.raises(ValueError, match=r"w_down \[E,I,D\] = \(2, 64, 32\) wants w_gate_up \(2, 32, 128\)"):
        expert_mlp(x, ids, weights, down, down)
    with pytest.raises(ValueError, match="no gradient goes through packed matrices"):
        jax.grad(lambda x: expert_mlp(x, ids, weights, gate_up, down).sum())(x)
