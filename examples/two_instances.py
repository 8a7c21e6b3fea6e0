"""A conversation begun in one process goes on in another, through Mooncake.

    python examples/two_instances.py

Starts a Mooncake of this machine (`pip install mooncake-transfer-engine-non-cuda`), then two processes one after the
other, each with an engine of its own. The first reads a prompt and writes a few lines; what it computed is written to
Mooncake on the way. The second is given the whole text and a line more: it goes on from where the first one stopped,
the end of what was generated and not only of the prompt, and computes its new line alone.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import NamedTuple

import kda_jax
from cache import Namespace
from kda_jax.engine import Engine
from transfer.mooncake import MooncakeObjects, MooncakeSettings
from transfer.mooncake.local import LocalMooncake

MODEL = Path(__file__).resolve().parent / "tiny"
TURNS = (
    "import argparse\n\n\nclass Command:\n    def run(self, args):\n" * 8,
    "\n    def stop(self):\n",
)


class Turn(NamedTuple):
    """A turn: tokens of its prompt, those that were restored from Mooncake, and what was generated."""

    prompt: int
    restored: int
    tokens: tuple[int, ...]


def one_turn(master: str, history: list[int], opening: str, count: int) -> Turn:
    """A turn in an engine of its own, on the Mooncake whose master is at `master`.

    Args:
        master: `host:port`.
        history: tokens of the conversation so far.
        opening: what the turn adds to it.
        count: tokens that it generates at most.
    """
    model, tokenizer = kda_jax.load(MODEL, dtype="float32"), kda_jax.load_tokenizer(MODEL)
    namespace = Namespace(weights=b"examples/tiny", tokenizer=b"examples/tiny")
    tokens = [*history, *tokenizer.encode(opening)]
    with (
        MooncakeObjects(MooncakeSettings(master=master)) as mooncake,
        Engine(
            model, namespace=namespace, slots=1, nbytes=2**25, max_tokens=2048, budget=64, remote=mooncake
        ) as engine,
    ):
        finished = engine.submit(tokens, max_new_tokens=count).result()
    return Turn(len(tokens), finished.usage.cached.get("remote", 0), finished.tokens)


def run(*, count: int = 48) -> list[Turn]:
    """Two turns, each in a process that ends with it.

    Args:
        count: tokens that each turn generates at most.
    """
    tokenizer, history, turns = kda_jax.load_tokenizer(MODEL), list[int](), list[Turn]()
    with LocalMooncake(segment_bytes=2**26) as mooncake:
        for opening in TURNS:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                turn = process.apply(one_turn, (mooncake.address, history, opening, count))
            history = [*history, *tokenizer.encode(opening), *turn.tokens]
            turns.append(turn)
    return turns


def main() -> None:
    tokenizer = kda_jax.load_tokenizer(MODEL)
    for number, turn in enumerate(run(), 1):
        print(f"process {number}: {turn.restored} of {turn.prompt} prompt tokens from Mooncake")
        print(tokenizer.decode(list(turn.tokens)), end="\n\n")


if __name__ == "__main__":
    main()
