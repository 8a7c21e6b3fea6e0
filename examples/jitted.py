"""Inference in jitted functions of your own: no engine, no server, the model and its state as values.

    python examples/jitted.py

One program reads a prompt, one makes all new tokens with `lax.scan`; both are yours to change. The state that the first
returns is used for two continuations: it is a value, and nobody writes into it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import kda_jax

MODEL = Path(__file__).resolve().parent / "tiny"
PROMPT = "class Queue:\n    def __init__(self, size):\n        self.size = size\n        self.items = []\n\n"
OPENINGS = "    def put(self", "    def get(self"


class Written(NamedTuple):
    """What an opening became: its text, and the text that was generated behind it."""

    opening: str
    text: str


@functools.partial(jax.jit, static_argnames=("graphdef", "room"))
def read(graphdef, params, tokens, room):
    """Reads int32 [B, T] from nothing: logits [B, vocab] behind the last, and a state with room for `room` tokens."""
    logits, state = kda_jax.prefill((graphdef, params), tokens, last_only=True, capacity=room)
    return logits[:, -1], state


@functools.partial(jax.jit, static_argnames=("graphdef", "count"))
def write(graphdef, params, tokens, state, count):
    """Reads int32 [B, T] behind `state`, then generates `count` tokens greedily: int32 [B, count]."""
    logits, state = kda_jax.prefill((graphdef, params), tokens, state, last_only=True)

    def step(carry, _):
        logits, state = carry
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return kda_jax.decode((graphdef, params), token, state), token

    _, written = jax.lax.scan(step, (logits[:, -1], state), length=count)
    return written.T


def run(*, count: int = 64) -> list[Written]:
    """Reads the prompt once and continues both openings from it.

    Args:
        count: tokens to generate behind each.
    """
    graphdef, params = kda_jax.split(kda_jax.load(MODEL, dtype="float32"))
    tokenizer = kda_jax.load_tokenizer(MODEL)
    prompt = jnp.array([tokenizer.encode(PROMPT)], jnp.int32)
    _, state = read(graphdef, params, prompt, room=prompt.shape[1] + 64 + count)
    written = []
    for opening in OPENINGS:
        tokens = jnp.array([tokenizer.encode(opening)], jnp.int32)
        ids = write(graphdef, params, tokens, state, count)
        written.append(Written(opening, tokenizer.decode(ids[0].tolist())))
    return written


def main() -> None:
    print(PROMPT, end="")
    for opening, text in run():
        print(f"{opening}{text}\n")


if __name__ == "__main__":
    main()
