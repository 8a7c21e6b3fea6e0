"""Sampling: what each limit keeps, what the penalty touches, and what the random numbers depend on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.sampling import Sampler, keep_likely, make_sampler, row_samplers, sample, sample_rows

LOGITS = jnp.log(jnp.asarray([[0.1, 0.4, 0.05, 0.3, 0.15]], jnp.float32))
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.84}, {1, 3, 4}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # of three, 0.4 and 0.3 are 0.82
        ({"top_k": 3, "top_p": 0.83}, {1, 3, 4}),
        ({"top_p": 0.71, "min_p": 0.4}, {1, 3}),
    ],
    ids=str,
)
def test_limits_keep_the_likeliest(limits: dict[str, Any], kept: set[int]) -> None:
    got = keep_likely(LOGITS, make_sampler(temperature=1.0, **limits))
    assert set(np.flatnonzero(np.isfinite(got[0])).tolist()) == kept
    np.testing.assert_array_equal(got[0][np.isfinite(got[0])], LOGITS[0][np.isfinite(got[0])])


def test_equal_logits_are_kept_together() -> None:
    got = keep_likely(jnp.zeros((1, 4), jnp.float32), make_sampler(temperature=1.0, top_k=2))
    assert np.isfinite(got).all()


def test_rows_are_limited_each_by_itself() -> None:
    both = jnp.concatenate([LOGITS, LOGITS[:, ::-1]])
    got = keep_likely(both, make_sampler(temperature=1.0, top_p=0.5))
    np.testing.assert_array_equal(np.isfinite(got), [[0, 1, 0, 1, 0], [0, 1, 0, 1, 0]])


def test_the_largest_wins_without_temperature() -> None:
    logits = jnp.asarray([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]], jnp.float32)
    position = jnp.zeros((2,), jnp.int32)
    assert sample(logits, Sampler(), KEY, position).tolist() == [1, 0]


def test_frequencies_are_the_probabilities() -> None:
    draw = jax.jit(
        lambda position: sample(LOGITS, make_sampler(temperature=2.0), KEY, position[None])[0], inline=True
    )
    tokens = jax.jit(jax.vmap(draw))(jnp.arange(20000, dtype=jnp.int32))
    want = np.exp(np.asarray(LOGITS[0]) / 2)
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / 20000, want / want.sum(), atol=0.015)


def test_the_random_number_follows_from_key_row_and_place() -> None:
    logits, sampler = jnp.zeros((3, 1000), jnp.float32), make_sampler(temperature=1.0)
    tokens = sample(logits, sampler, KEY, jnp.asarray([5, 5, 6], jnp.int32))
    again = sample(logits, sampler, KEY, jnp.asarray([5, 6, 6], jnp.int32))
    other = sample(logits, sampler, jax.random.key(1), jnp.asarray([5, 5, 6], jnp.int32))
    assert tokens[0] == again[0] and tokens[2] == again[2]
    assert len({*tokens.tolist(), int(again[1])}) == 4
    assert tokens.tolist() != other.tolist()


def test_the_penalty_makes_what_was_seen_less_likely() -> None:
    logits = jnp.asarray([[2.0, 1.5, -1.0, -1.5]], jnp.float32)
    position, sampler = jnp.zeros((1,), jnp.int32), make_sampler(repetition_penalty=2.0)
    seen = jnp.asarray([[True, False, False, False]])
    assert sample(logits, sampler, KEY, position, seen).tolist() == [1]
    seen = jnp.asarray([[True, True, True, False]])
    assert sample(logits.at[0, :2].set(-4.0), sampler, KEY, position, seen).tolist() == [3]
    with pytest.raises(ValueError, match="needs `seen`"):
        sample(logits, sampler, KEY, position)


def test_numbers_that_change_nothing_are_left_out() -> None:
    assert make_sampler(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1) == Sampler()
    assert make_sampler(temperature=0.7, top_p=1.0, min_p=0.0) == Sampler(np.float32(0.7))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_refuses_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make_sampler(**wrong)


MIXED = [
    Sampler(),
    make_sampler(temperature=1.0),
    make_sampler(temperature=0.7, top_k=3),
    make_sampler(temperature=1.5, top_p=0.6),
    make_sampler(temperature=1.0, min_p=0.4),
    make_sampler(temperature=2.0, top_k=40, top_p=0.95, min_p=0.01),
]
SEEDS = [0, 1, 2**31 + 5, 2**40 + 3, -1, 7]


def test_each_row_draws_what_its_text_alone_would() -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((6, 50)), jnp.float32)
    draw = jax.jit(sample_rows)
    for place in (0, 1, 300, 10**6):
        at = jnp.full((6,), place, jnp.int32)
        tokens = draw(logits, row_samplers(MIXED, SEEDS), at)
        for row, (sampler, seed) in enumerate(zip(MIXED, SEEDS)):
            alone = sample(logits[row : row + 1], sampler, jax.random.key(seed), at[:1])
            assert tokens[row] == alone[0], f"row {row} at {place}"


def test_a_rows_token_does_not_depend_on_its_row_or_neighbours() -> None:
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((6, 50)), jnp.float32)
    place = jnp.asarray(rng.integers(0, 99, 6), jnp.int32)
    tokens = np.asarray(sample_rows(logits, row_samplers(MIXED, SEEDS), place))
    order = np.asarray([4, 1, 3, 5, 0])
    samplers = row_samplers([MIXED[i] for i in order], [SEEDS[i] for i in order], 8)
    padded = jnp.concatenate([logits[order], jnp.full((3, 50), jnp.nan)])
    moved = sample_rows(padded, samplers, jnp.pad(place[order], (0, 3)))
    np.testing.assert_array_equal(tokens[order], moved[:5])


def test_rows_of_the_largest_logit_need_no_random_numbers() -> None:
    logits = jnp.asarray([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]], jnp.float32)
    assert sample_rows(
        logits, row_samplers([Sampler()] * 2, [0, 9]), jnp.zeros((2,), jnp.int32)
    ).tolist() == [1, 0]


def test_refuses_rows_without_a_sampler_or_with_a_penalty() -> None:
    with pytest.raises(ValueError, match="1 samplers and 2 seeds for 1 rows"):
        row_samplers([Sampler()], [1, 2])
    with pytest.raises(ValueError, match="2 samplers and 2 seeds for 1 rows"):
        row_samplers([Sampler()] * 2, [1, 2], 1)
    with pytest.raises(ValueError, match="repetition_penalty is not for rows"):
        row_samplers([make_sampler(repetition_penalty=2.0)], [1])
