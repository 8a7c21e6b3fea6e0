"""A conversation of several turns over the engine: what was read or written before is not computed again.

    python examples/conversation.py

Each turn's prompt is everything so far and a few lines more. The engine keeps a checkpoint at the end of each prompt
and of what it generates, so that a turn computes its new lines alone. At the end one turn is edited, and another second
half is told: it goes on from the last checkpoint before the edit.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import kda_jax
from cache import Namespace
from kda_jax.engine import Engine

MODEL = Path(__file__).resolve().parent / "tiny"
TURNS = (
    "import argparse\n\n\nclass Command:\n    def run(self, args):\n",
    "\n    def stop(self):\n",
    "\n    def main(self):\n",
)
EDIT = "\n    def check(self):\n"


class Turn(NamedTuple):
    """A turn: tokens of its prompt, those that came from the cache, and the text that was generated."""

    prompt: int
    cached: int
    text: str


def run(*, count: int = 48) -> list[Turn]:
    """Three turns, then the third anew with another opening.

    Args:
        count: tokens that each turn generates at most.
    """
    model, tokenizer = kda_jax.load(MODEL, dtype="float32"), kda_jax.load_tokenizer(MODEL)
    namespace = Namespace(weights=b"examples/tiny", tokenizer=b"examples/tiny")
    turns: list[Turn] = []

    def turn(engine: Engine, history: list[int], opening: str) -> list[int]:
        tokens = [*history, *tokenizer.encode(opening)]
        finished = engine.submit(tokens, max_new_tokens=count).result()
        cached = sum(finished.usage.cached.values())
        turns.append(Turn(len(tokens), cached, tokenizer.decode(list(finished.tokens))))
        return [*tokens, *finished.tokens]

    with Engine(model, namespace=namespace, slots=1, nbytes=2**25, max_tokens=2048, budget=64) as engine:
        histories: list[list[int]] = [[]]
        for opening in TURNS:
            histories.append(turn(engine, histories[-1], opening))
        turn(engine, histories[-2], EDIT)
    return turns


def main() -> None:
    for number, (prompt, cached, text) in enumerate(run(), 1):
        print(f"turn {number}: {cached} of {prompt} prompt tokens from the cache\n{text}\n")


if __name__ == "__main__":
    main()
