"""The static sizes of a call, and how a sequence's rows are shared out among the programs that read it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset as Preset
from jax.lax import Precision

MOST_CHANNELS = 2048
"""Values of 16 rows in float32 that the registers of eight warps still hold."""

SPLIT_ROWS = 1024
"""Rows of a split, at most: its means are H R float32 numbers, written and read, against 1024 (R + P) read."""

MOST_SPLITS = 64
"""Where that would make more, splits are longer instead."""

PIECE = 128
"""Channels an operand has at most: wider ones take more registers for their addresses than they save."""

CHANNELS = 16
"""Channels come in multiples of this, the least that a matrix unit sums over."""


class Plan(NamedTuple):
    """How a call is cut.

    Attributes:
        heads: H. Rows of a tile are (query, head) pairs, a query's heads side by side.
        num_rows: T * H.
        rank: R, a multiple of `CHANNELS`.
        channels: R + P, likewise.
        capacity: rows that a sequence can have.
        page: rows of a page; a contiguous buffer is one page a sequence.
        tile: (query, head) pairs a program.
        keys: latent rows a step, counted from row 0 of the sequence.
        splits: programs that share a sequence's rows.
        work: of the operands of products.
        interpret: run the bodies step by step, on any device.
    """

    heads: int
    num_rows: int
    rank: int
    channels: int
    capacity: int
    page: int
    tile: int
    keys: int
    splits: int
    work: jnp.dtype
    interpret: bool = False

    @property
    def warps(self) -> int:
        """Of a program that attends; with few sums four have enough to do."""
        return 8 if self.tile * self.rank > 16 * 128 else 4

    @property
    def holds_queries(self) -> bool:
        """Whether queries and keys are fetched once; three passes of TF32 leave no registers for that."""
        return self.work == jnp.bfloat16

    @property
    def lie_together(self) -> bool:
        """Whether the rows of a step are neighbours in the pool; what is not the sequence's own is masked."""
        return self.page in (self.capacity, round_up(self.page, self.keys))

    def mean_dtype(self, queries: jnp.dtype) -> jnp.dtype:
        """Of what `attend` writes: that of the queries, or float32 where there is more to sum."""
        return queries if self.splits == 1 else jnp.dtype(jnp.float32)

    @property
    def precision(self) -> Precision | Preset | None:
        """Of products: as exact as the inputs are; in float32 three passes of TF32, 2e-7."""
        if self.work == jnp.bfloat16:
            return None
        return Precision.HIGHEST if self.interpret else Preset.TF32_TF32_F32_X3


def make_plan(
    q: jax.ShapeDtypeStruct | jax.Array,
    latents: jax.ShapeDtypeStruct | jax.Array,
    pages: int,
    rank: int,
    *,
    interpret: bool = False,
) -> Plan:
    """The plan for q [B, T, H, C] and a pool of latents [num_pages, page_size, C], `pages` of them a sequence.

    What decides on a query's bits (operands, tile, keys, splits) follows from H, R, P, the dtypes and whether
    T is 1; not from T, nor from the capacity.
    """
    _, tokens, heads, channels = q.shape
    half = q.dtype == jnp.bfloat16 and latents.dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    capacity = pages * latents.shape[1]
    # 64 x 512 sums stay in the registers of eight warps; beside what float32 or float8 takes, half as many.
    most = 64 if half and latents.dtype.itemsize == 2 else 32
    wanted = heads if tokens == 1 else most
    tile = max(16, min(most, most * 512 // _power_of_two_from(rank), _power_of_two_from(wanted)))
    return Plan(
        heads=heads,
        num_rows=tokens * heads,
        rank=round_up(rank, CHANNELS),
        channels=round_up(max(channels, round_up(rank, CHANNELS)), CHANNELS),
        capacity=capacity,
        page=latents.shape[1],
        tile=tile,
        keys=32 if half else 16,
        splits=min(MOST_SPLITS, -(-capacity // SPLIT_ROWS)) if tokens == 1 else 1,
        work=jnp.dtype(jnp.bfloat16 if half else jnp.float32),
        interpret=interpret,
    )


def rows_a_split(seen: jax.Array, plan: Plan) -> jax.Array:
    """How many of a sequence's `seen` rows each split has, a multiple of `plan.keys`; the last may have fewer."""
    if plan.splits == 1:
        return seen
    count = jnp.clip(_ceil_div(seen, SPLIT_ROWS), 1, MOST_SPLITS)
    return _ceil_div(_ceil_div(seen, plan.keys), count) * plan.keys


def pieces(first: int, end: int) -> list[tuple[int, int]]:
    """Cuts channels first .. end into (first, count) with counts that are powers of two up to `PIECE`."""
    cuts = []
    while first < end:
        count = min(PIECE, 1 << ((end - first).bit_length() - 1))
        cuts.append((first, count))
        first += count
    return cuts


def round_up(size: int, step: int) -> int:
    """The next multiple of step."""
    return -(-size // step) * step


def _ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    b = jnp.asarray(b, jnp.int32)
    return jax.lax.div(a + b - 1, b)


def _power_of_two_from(size: int) -> int:
    return 1 << (size - 1).bit_length()
