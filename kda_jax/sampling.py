"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sampler(NamedTuple):
    """How to choose a token: a pytree of numbers, so that a new temperature compiles nothing.

    What is None is left out of the program. With `temperature` None the largest logit wins (of equals the
    lower id) and the three limits have no say.
    """

    temperature: np.float32 | None = None
    top_k: np.int32 | None = None
    top_p: np.float32 | None = None
    min_p: np.float32 | None = None
    repetition_penalty: np.float32 | None = None


def make_sampler(
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> Sampler:
    """Checks the numbers of a `Sampler` and drops those that change nothing.

    Args:
        temperature: divides the logits; 0 takes the largest logit always.
        top_k: keep the k largest logits (and those equal to the k-th).
        top_p: keep the fewest largest probabilities whose sum reaches p.
        min_p: keep probabilities of at least this fraction of the largest.
        repetition_penalty: divides positive and multiplies negative logits of tokens that were there before.

    Raises:
        ValueError: a number out of its range.
    """
    for name, value, good in (
        ("temperature", temperature, 0.0 <= temperature < math.inf),
        ("top_k", top_k, top_k is None or top_k >= 1),
        ("top_p", top_p, top_p is None or 0.0 < top_p <= 1.0),
        ("min_p", min_p, min_p is None or 0.0 <= min_p <= 1.0),
        ("repetition_penalty", repetition_penalty, 0.0 < repetition_penalty < math.inf),
    ):
        if not good:
            raise ValueError(
                f"{name}={value} is out of range: temperature >= 0, top_k >= 1, 0 < top_p <= 1, "
                "0 <= min_p <= 1, repetition_penalty > 0"
            )
    penalty = None if repetition_penalty == 1.0 else np.float32(repetition_penalty)
    if temperature == 0.0:
        return Sampler(repetition_penalty=penalty)
    return Sampler(
        np.float32(temperature),
        None if top_k is None else np.int32(min(top_k, np.iinfo(np.int32).max)),
        None if top_p is None or top_p == 1.0 else np.float32(top_p),
        None if not min_p else np.float32(min_p),
        penalty,
    )


def sample(
    logits: jax.Array, sampler: Sampler, key: jax.Array, position: jax.Array, seen: jax.Array | None = None
) -> jax.Array:
    """Chooses one token a row.

    The random number depends on the key, the row and the token's place in the sequence alone: not on how many
    tokens are made in one dispatch, nor on where the sequence was cut and resumed.

    Args:
        logits: float32 [B, vocab].
        sampler: how to choose.
        key: a random key, the same for the whole text.
        position: int32 [B], where in its sequence the token will stand.
        seen: bool [B, vocab], tokens that `repetition_penalty` applies to; needed when that is set.

    Returns:
        int32 [B].
    """
    if sampler.repetition_penalty is not None:
        if seen is None:
            raise ValueError("repetition_penalty needs `seen`, the tokens that were there before")
        penalty = sampler.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampler.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = keep_likely(logits / sampler.temperature, sampler)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    keys = jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(rows, position)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def keep_likely(logits: jax.Array, sampler: Sampler) -> jax.Array:
    """Sets logits that `top_k`, then `top_p`, then `min_p` leave out to -inf; the likeliest always stays.

    Each limit looks at what the ones before it left, as in transformers 5.24.

    Args:
        logits: float32 [B, vocab], already divided by the temperature.
        sampler: the limits.
    """
    if sampler.top_k is not None or sampler.top_p is not None:
        ordered = -jnp.sort(-logits, axis=-1)
        if sampler.top_k is not None:
            last = jnp.minimum(sampler.top_k, logits.shape[-1]) - 1
            least = jax.lax.dynamic_index_in_dim(ordered, last, axis=-1)
            logits, ordered = (jnp.where(x < least, -jnp.inf, x) for x in (logits, ordered))
        if sampler.top_p is not None:
            likely = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(likely, axis=-1) - likely
            ordered = jnp.where(before < sampler.top_p, ordered, jnp.inf)
            logits = jnp.where(logits < ordered.min(axis=-1, keepdims=True), -jnp.inf, logits)
    if sampler.min_p is not None:
        least = logits.max(axis=-1, keepdims=True) + jnp.log(sampler.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


class RowSamplers(NamedTuple):
    """How to choose in each row: arrays of one number a row, so that any mix of requests is one program.

    `temperature` 0 takes the largest logit. `top_k` of the vocabulary's size or more, `top_p` inf and `min_p` 0 leave
    nothing out.
    """

    temperature: jax.Array | np.ndarray  # float32 [B]
    top_k: jax.Array | np.ndarray  # int32 [B]
    top_p: jax.Array | np.ndarray  # float32 [B]
    min_p: jax.Array | np.ndarray  # float32 [B]
    seed: jax.Array | np.ndarray  # uint32 [B]


def row_samplers(samplers: Sequence[Sampler], seeds: Sequence[int], rows: int | None = None) -> RowSamplers:
    """One `Sampler` and one seed a row; the rows behind them, up to `rows`, are greedy.

    Raises:
        ValueError: samplers and seeds that do not pair up, more of them than `rows`, or a repetition penalty, which
            needs to know the tokens before.
    """
    rows = len(samplers) if rows is None else rows
    if len(samplers) != len(seeds) or len(samplers) > rows:
        raise ValueError(
            f"{len(samplers)} samplers and {len(seeds)} seeds for {rows} rows; give one of each a row"
        )
    if any(sampler.repetition_penalty is not None for sampler in samplers):
        raise ValueError("repetition_penalty is not for rows of a batch: leave it at 1, or use `generate`")

    def column(name: str, missing: float | int, dtype: type[np.generic]) -> np.ndarray:
        values = [getattr(sampler, name) for sampler in samplers]
        values = [missing if value is None else value for value in values]
        return np.asarray([*values, *[missing] * (rows - len(values))], dtype)

    return RowSamplers(
        column("temperature", 0.0, np.float32),
        column("top_k", np.iinfo(np.int32).max, np.int32),
        column("top_p", np.inf, np.float32),
        column("min_p", 0.0, np.float32),
        np.asarray([*(seed & 0xFFFFFFFF for seed in seeds), *[0] * (rows - len(seeds))], np.uint32),
    )


def sample_rows(logits: jax.Array, rows: RowSamplers, position: jax.Array) -> jax.Array:
    """Chooses one token a row, each row its own way.

    A row's token depends on its logits, seed, place and limits alone: not on its row, nor on the rows beside it. It is
    the one that `sample` draws for a text of one row with the key of that seed. Rows with a temperature are gone
    through one after the other, so that the bits of their sums do not depend on how many there are.

    Args:
        logits: float32 [B, vocab].
        rows: how to choose.
        position: int32 [B], where in its sequence the token will stand.

    Returns:
        int32 [B].
    """

    def draw(row: tuple[jax.Array, RowSamplers, jax.Array]) -> jax.Array:
        logits, one, at = row
        sampler = Sampler(*one[:4])  # pyright: ignore[reportArgumentType]  # numbers of the program

        def limited() -> jax.Array:
            return sample(logits[None], sampler, jax.random.key(one.seed), at[None])[0]

        return jax.lax.cond(one.temperature > 0, limited, lambda: jnp.argmax(logits).astype(jnp.int32))

    rows = RowSamplers(*map(jnp.asarray, rows))
    return jax.lax.cond(
        (rows.temperature > 0).any(),
        lambda: jax.lax.map(draw, (logits, rows, position)),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )
