"""A model whose state is a rolling hash of its tokens, so that any wrong resume gives another answer.

state_t = hash(state_{t-1}, token), starting from the namespace; the latent row of token t is a hash of state_{t+1}; the
answer to a prompt is a hash of its last state and of all its rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
ROW_NBYTES, STATE_NBYTES = 8, 16


def digest(*parts: bytes, size: int = STATE_NBYTES) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=size).digest()


def as_array(data: bytes) -> Bytes:
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array


class Run(NamedTuple):
    """What a call of the model has: states at boundaries from `start` on, and all rows from 0 on."""

    start: int
    states: tuple[bytes, ...]
    rows: tuple[bytes, ...]

    @property
    def answer(self) -> bytes:
        return digest(b"answer", self.states[-1], *self.rows)

    def checkpoint(self, boundary: int, page: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The state's payload at a boundary, with the rows of its unfinished page, and all pages before it."""
        whole = boundary // page * page
        state = {
            "recurrent": as_array(self.states[boundary - self.start]),
            "tail": as_array(b"".join(self.rows[whole:boundary])),
        }
        pages = [{"latent": as_array(b"".join(self.rows[at : at + page]))} for at in range(0, whole, page)]
        return state, pages


def start(namespace: bytes) -> Run:
    return Run(0, (digest(namespace),), ())


def resumed(boundary: int, state: Any, pages: Sequence[Any]) -> Run:
    """A run as if it had stopped at a boundary, from what a cache gave back."""
    data = b"".join([*(page["latent"].tobytes() for page in pages), state["tail"].tobytes()])
    rows = tuple(data[at : at + ROW_NBYTES] for at in range(0, len(data), ROW_NBYTES))
    return Run(boundary, (state["recurrent"].tobytes(),), rows)


def run(before: Run, tokens: Iterable[Any]) -> Run:
    """The model over more tokens."""
    states, rows = list(before.states), list(before.rows)
    for token in tokens:
        states.append(digest(states[-1], int(token).to_bytes(4, "little")))
        rows.append(digest(b"row", states[-1], size=ROW_NBYTES))
    return Run(before.start, tuple(states), tuple(rows))
