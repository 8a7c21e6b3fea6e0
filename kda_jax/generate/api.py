"""Generating text: prompt in, tokens or text out, and the state behind them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.forward import SplitModel, check_tokens, config_of, prefill, split
from kda_jax.generate.loop import DISPATCH, Decoding, choose_first, run, run_and_keep
from kda_jax.generate.text import TextStream
from kda_jax.model import Model
from kda_jax.sampling import Sampler, make_sampler
from kda_jax.state import ModelState

if TYPE_CHECKING:
    from kda_jax.tokenizer import Tokenizer

WITH_STOP = 16
"""Most tokens a dispatch makes when the host must look for stop strings: what lies behind one is thrown
away."""


class Generation(NamedTuple):
    """What was generated.

    Attributes:
        tokens: token ids, without the stop token, and without those that the stop string reaches into.
        text: their text ("" without a tokenizer), up to the stop string.
        finish_reason: "stop" for a stop token or stop string, "length" for `max_new_tokens` or the model's
            limit.
        state: the state behind the prompt and exactly `tokens`: pass it on with what follows them.
    """

    tokens: list[int]
    text: str
    finish_reason: Literal["stop", "length"]
    state: ModelState


def generate(
    model: Model | SplitModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    stop: Sequence[str] | str | None = None,
    tokenizer: Tokenizer | None = None,
    state: ModelState | None = None,
) -> Generation:
    """Continues a prompt.

    Args:
        model: a model, or what `split` made of it.
        prompt_ids: token ids, at least one; with `state`, those that follow what it has absorbed.
        max_new_tokens: most tokens to make.
        temperature: 0 takes the likeliest token always.
        top_k, top_p, min_p: limits, see `kda_jax.sampling.make_sampler`.
        repetition_penalty: above 1, tokens of this prompt and text become less likely (1 changes nothing).
        seed: of the random numbers. The same seed gives the same tokens.
        stop_tokens: tokens to end before; None for the config's end-of-text tokens, () for none.
        stop: texts to end before; needs `tokenizer`.
        tokenizer: turns tokens into text.
        state: what was absorbed before the prompt; it is left as it was. One row.

    Raises:
        ValueError: an empty prompt, ids out of the vocabulary or in place of an image, a prompt longer than the model
            takes, numbers out of range, or `stop` without a tokenizer.
    """
    pieces = stream(
        model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_tokens=stop_tokens,
        stop=stop,
        tokenizer=tokenizer,
        state=state,
    )
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def stream(
    model: Model | SplitModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    stop: Sequence[str] | str | None = None,
    tokenizer: Tokenizer | None = None,
    state: ModelState | None = None,
) -> Generator[str | int, None, Generation]:
    """`generate`, giving out what comes as it comes: text with a tokenizer, token ids without.

    Joined, the pieces are the `text` (or the `tokens`) of the `Generation` that the generator returns at its
    end. A piece never ends within a character, and never holds any part of a stop string.
    """
    sampler = make_sampler(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    stop = [stop] if isinstance(stop, str) else list(stop or ())
    if stop and (tokenizer is None or "" in stop):
        raise ValueError(f"stop={stop} needs a tokenizer, and texts that are not empty")
    if max_new_tokens < 0:
        raise ValueError(f"{max_new_tokens=} must not be negative")
    parts = model if isinstance(model, tuple) else split(model)
    config = config_of(parts)
    ids = check_tokens([list(prompt_ids)], config, 2)
    end = ids.shape[1] + (0 if state is None else int(np.asarray(state.position).max()))
    limit = max(0, min(max_new_tokens, config.model_max_length - end))
    ends = np.asarray(config.stop_tokens if stop_tokens is None else stop_tokens, np.int32).reshape(-1)
    ends = np.pad(ends, (0, 1), constant_values=-1)

    logits, state = prefill(parts, ids, state, last_only=True, capacity=end + limit)
    key, seen = jax.random.key(seed), None
    if sampler.repetition_penalty is not None:
        seen = np.zeros((1, config.vocab_size), np.bool_)
        seen[0, ids[0]] = True
        seen = jnp.asarray(seen)
    token = choose_first(logits[:, 0], state.position, seen, key, sampler)
    now = Decoding(token, state, seen)
    text = None if tokenizer is None else TextStream(partial(tokenizer.decode, skip_special=True), stop)
    tokens: list[int] = []
    past = [(0, now)]  # with stop strings: where to go back to when one is met
    finish_reason, size = "length", 1
    while len(tokens) < limit and finish_reason == "length":
        asked = min(size, limit - len(tokens))
        advance = run_and_keep if stop else run
        now, count, row = advance(*parts, now, np.int32(asked), ends, key, sampler)
        for token in np.asarray(row)[0, : int(count)].tolist():
            tokens.append(token)
            piece = token if text is None else text.push(token)
            if piece != "":
                yield piece
            if text is not None and text.stopped:
                break
        if text is not None and text.stopped:
            del tokens[text.num_kept :]
            now, finish_reason = _replay(parts, past, len(tokens), ends, key, sampler), "stop"
        elif count < asked:
            finish_reason = "stop"
        elif text is not None and stop:
            past = [*_from(past, text.num_safe), (len(tokens), now)]
        size = min(2 * size, WITH_STOP if stop else DISPATCH)
    if text is not None and (rest := text.finish()):
        yield rest
    return Generation(tokens, "" if text is None else text.text, finish_reason, now.state)


def _from(past: list[tuple[int, Decoding]], count: int) -> list[tuple[int, Decoding]]:
    """The last point that is not behind `count` tokens, and those after it."""
    return past[max(i for i, point in enumerate(past) if point[0] <= count) :]


def _replay(
    parts: SplitModel,
    past: list[tuple[int, Decoding]],
    count: int,
    ends: np.ndarray,
    key: jax.Array,
    sampler: Sampler,
) -> Decoding:
    """Where the text stood after `count` tokens: the same steps again, from the last point before."""
    done, now = _from(past, count)[0]
    while done < count:
        asked = min(DISPATCH, count - done)
        now = run_and_keep(*parts, now, np.int32(asked), ends, key, sampler)[0]
        done += asked
    return now
