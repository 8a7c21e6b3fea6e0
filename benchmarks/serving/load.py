"""A trace's requests, made small enough to be served here: fewer tokens, and real text in place of block ids."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.trace import BLOCK, Request
from examples.tiny_lm.corpus import find_sources
from kda_jax.tokenizer import Tokenizer

TEXT_NBYTES = 1 << 20


class Asked(NamedTuple):
    """One request.

    Attributes:
        tokens: of the prompt.
        max_tokens: to generate.
        draw: in [0, 1); says which of several servers is asked.
    """

    tokens: list[int]
    max_tokens: int
    draw: float


def text_tokens(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """The first megabyte of the standard library's own sources, as token ids [T]."""
    parts, size = [], 0
    for source in find_sources():
        parts.append(source.data.decode())
        size += len(source.data)
        if size >= TEXT_NBYTES:
            break
    return np.array(tokenizer.encode("".join(parts)), np.int32)


def scaled(trace: Sequence[Request], text: NDArray[np.int32], divide: int) -> list[Asked]:
    """Requests whose prompts share what the trace says they share, `divide` times shorter.

    Args:
        trace: requests.
        text: token ids that blocks are cut from, [T].
        divide: a block of the trace becomes this many times fewer tokens; divides `BLOCK`.

    Raises:
        ValueError: if `divide` does not divide `BLOCK`, or the text is shorter than a block.
    """
    if divide < 1 or BLOCK % divide or len(text) <= BLOCK // divide:
        raise ValueError(
            f"{divide=} must divide {BLOCK}, and {len(text)} tokens of text be more than a block"
        )
    block = BLOCK // divide

    def piece(name: str, count: int) -> NDArray[np.int32]:
        start = Random(name).randrange(len(text) - block)
        return text[start : start + count]

    asked, random = [], Random("servers")
    for number, request in enumerate(trace):
        parts = [piece(f"block {id}", block) for id in request.blocks]
        rest = (request.num_tokens - len(request.blocks) * BLOCK) // divide
        parts.append(piece(f"end of {number}", max(rest, 1)))
        tokens = np.concatenate(parts).tolist()
        asked.append(Asked(tokens, max(2, request.output_tokens // divide), random.random()))
    return asked
