"""Many decoded tokens a dispatch: sampling, stop tokens and the state all stay on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from kda_jax.forward import Params, SplitModel, bucket, step
from kda_jax.model import Model
from kda_jax.sampling import Sampler, sample
from kda_jax.state import ModelState, grow

DISPATCH = 64
"""Most tokens a dispatch makes. Any smaller number runs the same program, and so makes the same bits."""


class Decoding(NamedTuple):
    """Where a text stands.

    `token` int32 [B] is chosen and not yet absorbed; `state` has absorbed everything before it. `seen` bool
    [B, vocab] is what the repetition penalty applies to, None without one.
    """

    token: jax.Array
    state: ModelState
    seen: jax.Array | None


@jax.jit
def choose_first(
    logits: jax.Array, position: jax.Array, seen: jax.Array | None, key: jax.Array, sampler: Sampler
) -> jax.Array:
    """Chooses the token behind a prompt from its last logits: `sample`, jitted."""
    return sample(logits, sampler, key, position, seen)


def _run(
    graphdef: nnx.GraphDef[Model],
    params: Params,
    now: Decoding,
    limit: jax.Array,
    stops: jax.Array,
    key: jax.Array,
    sampler: Sampler,
) -> tuple[Decoding, jax.Array, jax.Array]:
    """Absorbs up to `limit` tokens, ending early before any row would absorb a stop token.

    Returns:
        where the text stands, how many tokens were absorbed, and the tokens, int32 [B, DISPATCH].
    """
    model = nnx.merge(graphdef, params)
    rows = jnp.arange(now.token.shape[0], dtype=jnp.int32)

    def more(carry):
        now, count, _ = carry
        return (count < limit) & ~(now.token[:, None] == stops[None, :]).any()

    def absorb(carry):
        now, count, tokens = carry
        tokens = jax.lax.dynamic_update_slice(tokens, now.token[:, None], (0, count))
        logits, state = step(model, now.token, now.state)
        seen = None if now.seen is None else now.seen.at[rows, now.token].set(True)
        token = sample(logits, sampler, key, state.position, seen)
        return Decoding(token, state, seen), count + 1, tokens

    tokens = jnp.zeros((now.token.shape[0], DISPATCH), jnp.int32)
    return jax.lax.while_loop(more, absorb, (now, jnp.int32(0), tokens))


run_and_keep = functools.partial(jax.jit, static_argnames=("graphdef",))(_run)
run = functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("now",))(_run)
"""`_run`, with its `now` left as it was, or given up so that the state is updated in place."""


def decode_tokens(
    split_model: SplitModel,
    token: ArrayLike | Sequence[int],
    state: ModelState,
    num_tokens: int,
    *,
    sampler: Sampler | None = None,
    seed: int = 0,
) -> tuple[np.ndarray, ModelState]:
    """Absorbs a token a row, chooses the next, and goes on so for `num_tokens` tokens, many a dispatch.

    Args:
        split_model: what `split` made of a model.
        token: int32 [B], the first tokens to absorb.
        state: what the rows have absorbed before; it is left as it was.
        num_tokens: how many tokens to absorb.
        sampler: how to choose; greedily when None.
        seed: of the random numbers.

    Returns:
        int32 [B, num_tokens], the tokens absorbed (`token` first), and the state behind them.
    """
    graphdef, params = split_model
    end = int(np.asarray(state.position).max()) + num_tokens
    if state.capacity is not None and state.capacity < end:
        state = grow(state, bucket(end))
    # The first dispatch may not give up the caller's token and state: it works on copies.
    now = Decoding(jnp.array(token, jnp.int32), jax.tree.map(jnp.copy, state), None)
    stops = np.full((1,), -1, np.int32)
    pieces = []
    while num_tokens > 0:
        limit = np.int32(min(num_tokens, DISPATCH))
        now, _, tokens = run(graphdef, params, now, limit, stops, jax.random.key(seed), sampler or Sampler())
        pieces.append(np.asarray(tokens)[:, :limit])
        num_tokens -= int(limit)
    return np.concatenate(pieces, axis=1), now.state
