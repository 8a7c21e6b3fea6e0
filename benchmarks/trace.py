"""Traces in Mooncake's format: a JSON object a line, with prompts known by blocks of 512 tokens."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 512
UNKNOWN = 2**31 - 1
"""The token that stands for those behind a prompt's last whole block."""


class Request(NamedTuple):
    """One request of a trace.

    Attributes:
        seconds: when it came.
        num_tokens: length of its prompt.
        blocks: ids of its whole blocks; two prompts with one id share everything up to the end of that block.
        output_tokens: what was generated behind it; 0 where the trace does not say.
    """

    seconds: float
    num_tokens: int
    blocks: tuple[int, ...]
    output_tokens: int = 0

    def tokens(self) -> NDArray[np.int32]:
        """Token ids that are equal where the trace says that prompts are, `[num_tokens]`."""
        tokens, whole = np.empty(self.num_tokens, np.int32), len(self.blocks) * BLOCK
        tokens[:whole].reshape(-1, BLOCK)[:] = np.array(self.blocks, np.int32)[:, None]
        tokens[whole:] = UNKNOWN
        return tokens


def read(path: Path) -> list[Request]:
    """Reads a trace, compressed by gzip if its name ends in `.gz`.

    Raises:
        ValueError: for a line that is no request.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return list(parse(lines, path))


def parse(lines: Iterable[str], path: Path) -> Iterator[Request]:
    """Requests of a trace's lines; `path` names it in errors."""
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            length, ids = int(row["input_length"]), row["hash_ids"]
            blocks = tuple(map(int, ids[: length // BLOCK]))
            request = Request(row["timestamp"] / 1000, length, blocks, int(row.get("output_length", 0)))
            if length < 1 or len(request.blocks) < length // BLOCK:
                raise ValueError(f"{length} tokens and {len(ids)} blocks")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number} is no request of a Mooncake trace ({error}): it needs timestamp, "
                f"input_length and an id in hash_ids for each block of {BLOCK} tokens"
            ) from error
        yield request
