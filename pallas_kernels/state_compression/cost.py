"""What compression and decompression must do, by count: every number is read once and written once."""

from __future__ import annotations

from jax.experimental import pallas as pl

COMPRESS_FLOPS, DECOMPRESS_FLOPS = 16, 1  # a number, comparisons included


def compress_cost(rows: int, values: int) -> pl.CostEstimate:
    """`compress` of rows of a state."""
    return _cost(rows, values, COMPRESS_FLOPS)


def decompress_cost(rows: int, values: int) -> pl.CostEstimate:
    """`decompress` of rows of a state."""
    return _cost(rows, values, DECOMPRESS_FLOPS)


def _cost(rows: int, values: int, flops: int) -> pl.CostEstimate:
    moved = rows * ((4 + 1) * values + 4)
    return pl.CostEstimate(flops=flops * rows * values, transcendentals=0, bytes_accessed=moved)
