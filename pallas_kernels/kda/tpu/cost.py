"""What a call of each kernel must do, by count: for the compiler's schedule and for `check`.

Products with masks on squares count whole. Bytes are those of inputs and outputs, channels that fill up lanes included.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.kda.tpu.chunk import CHUNK, LEVELS


class Work(NamedTuple):
    """A call's sizes; `itemsize` is of q, k and v."""

    chunks: int
    sequences: int
    heads: int
    keys: int
    values: int
    itemsize: int


def forward_cost(work: Work, marked: int) -> pl.CostEstimate:
    """`kda_chunks`, with `marked` boundaries a sequence."""
    wide, tall, square, cube = _products(work)
    # sums; pairs of keys and of queries; the inverse; both products with u; two with the state; the state left behind
    flops = (2 + 4 * LEVELS) * wide + 2 * LEVELS * cube + 2 * square + 4 * tall
    at = work.sequences * marked * (wide + 2 * tall)
    states = (2 + marked) * work.sequences * _tile(work)
    moved = CHUNK * (_row(work) + work.values * work.itemsize)
    return _estimate(work, flops, moved, at, states)


def states_cost(work: Work) -> pl.CostEstimate:
    """`kda_states`."""
    wide, tall, square, cube = _products(work)
    flops = (2 + 3 * LEVELS) * wide + 2 * LEVELS * cube + square + 3 * tall
    moved = CHUNK * (_row(work) - work.keys * work.itemsize) + _tile(work)
    return _estimate(work, flops, moved, 0, work.sequences * _tile(work))


def backward_cost(work: Work) -> pl.CostEstimate:
    """`kda_backward`: the chunk's matrices again, and two products for each (of a sum one, of the inverse two)."""
    wide, tall, square, cube = _products(work)
    again = (2 + 4 * LEVELS) * wide + 2 * LEVELS * cube + square + 2 * tall
    back = (2 + 6 * LEVELS) * wide + 2 * cube + 4 * square + 7 * tall
    moved = CHUNK * (2 * _row(work) + work.values * work.itemsize) + _tile(work)
    return _estimate(work, again + back, moved, 0, 2 * work.sequences * _tile(work))


def step_cost(rows: int, heads: int, keys: int, values: int) -> pl.CostEstimate:
    """`kda_step` over a batch of rows: the state in and out, everything else in float32."""
    moved = 2 * 4 * keys * values + 4 * (4 * keys + 2 * values)
    count = rows * heads
    return pl.CostEstimate(flops=count * 7 * keys * values, transcendentals=0, bytes_accessed=count * moved)


def _products(work: Work) -> tuple[int, int, int, int]:
    """Operations of a product: of squares of rows with K columns, of rows with a state, of a square with V columns, of
    two squares."""
    rows = 2 * CHUNK
    return (
        rows * CHUNK * work.keys,
        rows * work.keys * work.values,
        rows * CHUNK * work.values,
        rows * CHUNK * CHUNK,
    )


def _row(work: Work) -> int:
    """Bytes of a row of q, k, g, v and beta."""
    return (2 * work.keys + work.values) * work.itemsize + 4 * work.keys + 4


def _tile(work: Work) -> int:
    """Bytes of a state."""
    return 4 * work.keys * work.values


def _estimate(work: Work, flops: int, moved: int, once_flops: int, once_moved: int) -> pl.CostEstimate:
    """From what a chunk of a head does, and a head once."""
    exponentials = (2 + 2 * LEVELS) * CHUNK * work.keys + work.keys * work.values
    return pl.CostEstimate(
        flops=work.heads * (work.chunks * flops + once_flops),
        transcendentals=work.heads * work.chunks * exponentials,
        bytes_accessed=work.heads * (work.chunks * moved + once_moved),
    )
