"""What the programs are called with, and what they choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from kda_jax.sampling import Sampler


class Lane(NamedTuple):
    """One sequence in a step.

    Attributes:
        slot: where its KDA states lie, 1 and up.
        pages: its pages of latents in order, with room for the tokens of the step.
        position: tokens absorbed.
        sampler, seed: how the next token is chosen.
    """

    slot: int
    pages: Sequence[int]
    position: int
    sampler: Sampler = Sampler()
    seed: int = 0


class Cut(NamedTuple):
    """A snapshot to save while a chunk is read: where, counted from the beginning of the sequence, and the pages."""

    position: int
    pages: Sequence[int]


class Chosen(NamedTuple):
    """What a step chose, on the device: tokens int32 [B], and the logits before any limit, float32 [B, vocab]. Rows
    behind those that were asked for are padding."""

    tokens: jax.Array
    logits: jax.Array


class Verified(NamedTuple):
    """What a step with drafts chose, on the device: behind each token, int32 [B, T]; how many drafts of a row count,
    int32 [B]; and the logits before any limit, float32 [B, T, vocab]. A row's new tokens are the first accepted + 1:
    its drafts that count, and one more."""

    tokens: jax.Array
    accepted: jax.Array
    logits: jax.Array
