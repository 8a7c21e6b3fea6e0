"""Running a model: prompts in padded buckets, single tokens, and the states behind them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike

from kda_jax.config import ModelConfig
from kda_jax.model import Model
from kda_jax.state import KDAState, ModelState, empty, grow

Params: TypeAlias = Any  # an nnx.State: a pytree of arrays
SplitModel: TypeAlias = tuple[nnx.GraphDef[Model], Params]


def split(model: Model) -> SplitModel:
    """Takes a model apart into its static structure and its parameters, a pytree of arrays.

    Inside a jitted function `nnx.merge(graphdef, params)` is the model again. `prefill` and `decode` take the
    pair in place of the model, which saves them taking it apart at every call.
    """
    return nnx.split(model)


def bucket(num_tokens: int) -> int:
    """The padded length for a call of `num_tokens`: 64, 128, 192, 256, then four steps a power of two."""
    if num_tokens <= 256:
        return max(64, -(-num_tokens // 64) * 64)
    step = 1 << (int(num_tokens - 1).bit_length() - 3)
    return -(-num_tokens // step) * step


def prefill(
    model: Model | SplitModel,
    tokens: ArrayLike | Sequence[Sequence[int]],
    state: ModelState | None = None,
    lengths: ArrayLike | Sequence[int] | None = None,
    boundaries: Sequence[int] | None = None,
    *,
    last_only: bool = False,
    capacity: int | None = None,
) -> tuple[jax.Array, ModelState, *tuple[list[ModelState], ...]]:
    """Reads tokens, going on from `state`.

    Outside of jit the tokens are padded to a bucket, so that a script compiles few programs, and one jitted
    function runs. Under a caller's jit the call is the plain function, without padding and without checks of
    values.

    Args:
        model: a model, or what `split` made of it.
        tokens: token ids, [B, T].
        state: what the rows have absorbed; it is left as it was. None for nothing.
        lengths: [B], tokens of each row that count, 0..T; the rest is padding.
        boundaries: token counts of the sequences (from their beginning, not from this call's), each in
            (position, position + length] of every row, at which to return the state too.
        last_only: logits of each row's last token only, with the bits they have among all.
        capacity: tokens a row shall have room for at least; more room is made as needed in any case.

    Returns:
        float32 logits [B, T, vocab] ([B, 1, vocab] with `last_only`), the state behind each row's last token,
        and with `boundaries` the states there, in the order asked.

    Raises:
        ValueError: tokens of a wrong shape, out of the vocabulary or in place of an image, lengths or boundaries out of
            range, or a sequence longer than `model_max_length`.
    """
    graphdef, params = model if isinstance(model, tuple) else nnx.split(model)
    config = config_of((graphdef, params))
    if _traced((params, tokens, state, lengths)):
        return _prefill_traced(
            graphdef, params, config, tokens, state, lengths, boundaries, last_only, capacity
        )

    ids = check_tokens(tokens, config, 2)
    rows, count = ids.shape
    counts = _check_lengths(lengths, rows, count)
    position = _position(state, rows)
    ends = position + counts
    if ends.max() > config.model_max_length:
        raise ValueError(
            f"the sequence would have {ends.max()} tokens; the model takes {config.model_max_length}"
        )
    relative = None if boundaries is None else _check_boundaries(boundaries, position, counts)
    room = max(int(ends.max()), capacity or 1)
    if state is None:
        state = empty(config, rows, bucket(room), dtype_of(params))
    elif state.capacity is not None and state.capacity < room:
        state = grow(state, bucket(room))
    padded = np.zeros((rows, bucket(count)), np.int32)
    padded[:, :count] = ids
    logits, end, owns = _prefill_jit(graphdef, params, padded, state, counts, relative, last_only)
    if not last_only and count < padded.shape[1]:
        logits = logits[:, :count]
    if boundaries is None:
        return logits, end
    return logits, end, [_checkpoint(end, own) for own in owns[: len(boundaries)]]


def decode(
    model: Model | SplitModel, tokens: ArrayLike | Sequence[int], state: ModelState
) -> tuple[jax.Array, ModelState]:
    """Reads one token a row.

    Args:
        model: a model, or what `split` made of it.
        tokens: token ids, [B].
        state: what the rows have absorbed; it is left as it was.

    Returns:
        float32 logits [B, vocab] and the next state.

    Raises:
        ValueError: tokens of a wrong shape or out of the vocabulary, or a sequence longer than
            `model_max_length`.
    """
    graphdef, params = model if isinstance(model, tuple) else nnx.split(model)
    if _traced((params, tokens, state)):
        return step(nnx.merge(graphdef, params), jnp.asarray(tokens, jnp.int32), state)
    config = config_of((graphdef, params))
    ids = check_tokens(tokens, config, 1)
    end = int(_position(state, ids.shape[0]).max()) + 1
    if end > config.model_max_length:
        raise ValueError(f"the sequence has {end - 1} tokens already, all that the model takes")
    if state.capacity is not None and state.capacity < end:
        state = grow(state, bucket(end))
    return _decode_jit(graphdef, params, ids, state)


def step(model: Model, tokens: jax.Array, state: ModelState) -> tuple[jax.Array, ModelState]:
    """`decode` as a pure function, for use inside jit: int32 [B] to logits [B, vocab] and the next state."""
    logits, state = model(tokens[:, None], state)
    return logits[:, 0], state


def dtype_of(params: Params) -> jnp.dtype:
    """The dtype a model computes in: its embedding's."""
    return params["embed"][...].dtype


def check_tokens(tokens: ArrayLike | Sequence, config: ModelConfig, ndim: int) -> np.ndarray:
    """Token ids as int32, or a ValueError that says what is wrong with them."""
    ids = np.asarray(tokens)
    shape = "[B, T]" if ndim == 2 else "[B]"
    if ids.ndim != ndim or ids.size == 0:
        raise ValueError(f"tokens must be {shape} with at least one token a row, got shape {ids.shape}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens must be integers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        strange = ids[(ids < 0) | (ids >= config.vocab_size)].flat[0]
        raise ValueError(f"token id {strange} lies outside the vocabulary of {config.vocab_size}")
    media = config.media_placeholder_token_id
    if media is not None and (count := np.count_nonzero(ids == media)):
        raise ValueError(
            f"the tokens hold {count} image placeholder(s), id {media}; only text can be read: leave images out"
        )
    return ids.astype(np.int32)


def config_of(parts: SplitModel) -> ModelConfig:
    """The config of a model that `split` took apart."""
    graphdef, params = parts
    if graphdef not in _CONFIGS:
        _CONFIGS[graphdef] = nnx.merge(graphdef, params).config
    return _CONFIGS[graphdef]


_CONFIGS: dict[nnx.GraphDef[Model], ModelConfig] = {}


def _traced(tree: object) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _check_lengths(lengths: ArrayLike | Sequence[int] | None, rows: int, count: int) -> np.ndarray:
    if lengths is None:
        return np.full((rows,), count, np.int32)
    counts = np.asarray(lengths)
    if counts.shape != (rows,) or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"lengths must be {rows} integers, one a row, got {counts.dtype} {counts.shape}")
    if counts.min() < 0 or counts.max() > count:
        raise ValueError(f"lengths must lie in 0..{count}, the tokens of a row, got {counts.tolist()}")
    return counts.astype(np.int32)


def _position(state: ModelState | None, rows: int) -> np.ndarray:
    if state is None:
        return np.zeros((rows,), np.int32)
    position = np.asarray(state.position)
    if position.shape != (rows,):
        raise ValueError(
            f"state has {position.shape[0]} rows, tokens {rows}; they must be the same sequences"
        )
    return position


def _check_boundaries(boundaries: Sequence[int], position: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[B, NB'] counts of this call; NB' is a power of two, the last one repeated, to compile few programs."""
    asked = np.asarray(list(boundaries), np.int32)
    if asked.size == 0:
        raise ValueError("boundaries is empty; pass None to ask for no states")
    relative = asked[None, :] - position[:, None]
    if relative.min() <= 0 or (relative > counts[:, None]).any():
        raise ValueError(
            f"boundaries must lie behind each row's position {position.tolist()} and not behind its end "
            f"{(position + counts).tolist()}, got {asked.tolist()}"
        )
    padding = (1 << (asked.size - 1).bit_length()) - asked.size
    return np.pad(relative, ((0, 0), (0, padding)), mode="edge")


def _forward(
    model: Model,
    tokens: jax.Array,
    state: ModelState,
    lengths: jax.Array | None,
    boundaries: jax.Array | None,
    last_only: bool,
) -> tuple[jax.Array, ModelState, list[Own]]:
    logits, state, *at = model(tokens, state, lengths, boundaries, last_only)
    if boundaries is None:
        return logits, state, []
    return logits, state, [_own(at[0], i) for i in range(boundaries.shape[-1])]


Own: TypeAlias = tuple[KDAState | jax.Array, ...]
"""What a checkpoint does not share with the state that a call ends in: KDA's states, and MLA's positions."""


def _own(at: ModelState, index: int) -> Own:
    return tuple(
        KDAState(*(leaf[:, index] for leaf in layer))
        if isinstance(layer, KDAState)
        else layer.position[:, index]
        for layer in at.layers
    )


def _checkpoint(end: ModelState, own: Own) -> ModelState:
    """A boundary's state. Its latents are the end state's very arrays (what lies behind the position is dead), which
    only holds outside of jit: a jitted function returns a copy for each time it names an array."""
    return ModelState(
        tuple(
            mine if isinstance(mine, KDAState) else last._replace(position=mine)
            for last, mine in zip(end.layers, own, strict=True)
        )
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "last_only"))
def _prefill_jit(graphdef, params, tokens, state, lengths, boundaries, last_only):
    return _forward(nnx.merge(graphdef, params), tokens, state, lengths, boundaries, last_only)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _decode_jit(graphdef, params, tokens, state):
    return step(nnx.merge(graphdef, params), tokens, state)


def _prefill_traced(graphdef, params, config, tokens, state, lengths, boundaries, last_only, capacity):
    tokens = jnp.asarray(tokens, jnp.int32)
    rows, count = tokens.shape
    if state is None:
        state = empty(config, rows, max(count, capacity or 1), dtype_of(params))
    elif capacity is not None:
        state = grow(state, capacity)
    relative = None
    if boundaries is not None:
        relative = jnp.asarray(list(boundaries), jnp.int32)[None, :] - state.position[:, None]
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    logits, end, owns = _forward(nnx.merge(graphdef, params), tokens, state, lengths, relative, last_only)
    return (logits, end) if boundaries is None else (logits, end, [_checkpoint(end, own) for own in owns])
