"""A tile of a state, or of its gradient, on its way through the chunks, with a copy for each: what that chunk meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kda.triton.tile import BLOCK, Columns, Plan, product

Written: TypeAlias = tuple[Any, jax.Array, float]


class Held:
    """In registers.

    Args:
        trace_ref: the copies, float32 [C, H, K, V].
        end_ref: where the tile ends, [1, 1, K, tile]; None lets go of it.
        decay_ref: each chunk's decay, [C, H, K].
        head, columns: whose tile, and which.
    """

    def __init__(self, trace_ref, end_ref, decay_ref, head, columns: Columns, plan: Plan) -> None:
        self.trace_ref, self.end_ref, self.decay_ref = trace_ref, end_ref, decay_ref
        self.head, self.columns, self.plan = head, columns, plan

    def begin(self, begin_ref, c, none) -> jax.Array:
        """The tile [1, 1, K, tile] for chunk c, unless there is none: the carry of the loop over chunks."""
        del c, none
        return begin_ref[0, 0]

    def keep(self, c, carried: jax.Array) -> None:
        """Copies what chunk c meets."""
        self.trace_ref[c, self.head, :, self.columns] = carried

    def seen_by(self, rows_ref, c, carried: jax.Array) -> jax.Array:
        """The chunk's rows, of [C, H, L, K], times the tile: [L, tile]."""
        tile = carried.astype(self.plan.work)
        if rows_ref.dtype == tile.dtype:
            return product(rows_ref[c, self.head], tile, self.plan)

        def add(i, seen):
            """What the tile's dtype holds of the rows, then what is left; both at once would spill."""
            rows = rows_ref[c, self.head]
            high = rows.astype(tile.dtype)
            part = jnp.where(i == 0, high, (rows - high.astype(jnp.float32)).astype(tile.dtype))
            return seen + product(part, tile, self.plan)

        return jax.lax.fori_loop(0, 2, add, jnp.zeros((self.plan.chunk, self.plan.value_tile), jnp.float32))

    def step(self, c, to, last, carried: jax.Array, written: Sequence[Written]) -> jax.Array:
        """From chunk c to the chunk `to`, or to the end: decayed, plus rows^T values, and a factor, of all written."""
        del to, last
        tile = self.decay_ref[c, self.head][:, None] * carried
        for rows_ref, values, factor in written:
            rows, values = (x.astype(self.plan.work) for x in (rows_ref[c, self.head], values))
            tile = tile + factor * product(rows.T, values, self.plan)
        return tile

    def finish(self, carried: jax.Array) -> None:
        if self.end_ref is not None:
            self.end_ref[0, 0] = carried


class Stored(Held):
    """In memory, where the copies stand, a slice of key channels at a time.

    Three passes of TF32 over a tile in registers would spill kilobytes.
    """

    def begin(self, begin_ref, c, none) -> jax.Array:
        def copy(slot, carry):
            self._put(c, none, slot, begin_ref[0, 0, slot, :])
            return carry

        return self._slices(copy, jnp.int32(0))

    def keep(self, c, carried: jax.Array) -> None:
        pass

    def seen_by(self, rows_ref, c, carried: jax.Array) -> jax.Array:
        def add(slot, total):
            rows = rows_ref[c, self.head, :, slot].astype(jnp.float32)
            tile = self.trace_ref[c, self.head, slot, self.columns]
            return total + product(rows, tile, self.plan, fine=rows_ref.dtype == jnp.float32)

        return self._slices(add, jnp.zeros((self.plan.chunk, self.plan.value_tile), jnp.float32))

    def step(self, c, to, last, carried: jax.Array, written: Sequence[Written]) -> jax.Array:
        def write(slot, carry):
            decay = self.decay_ref[c, self.head, slot][:, None]
            tile = decay * self.trace_ref[c, self.head, slot, self.columns]
            for rows_ref, values, factor in written:
                rows, values = (x.astype(jnp.float32) for x in (rows_ref[c, self.head, :, slot], values))
                tile = tile + factor * product(rows.T, values, self.plan)
            self._put(to, last, slot, tile)
            return carry

        return self._slices(write, carried)

    def finish(self, carried: jax.Array) -> None:
        pass

    def _put(self, c, last, slot, tile: jax.Array) -> None:
        @pl.when(jnp.logical_not(last))
        def _():
            self.trace_ref[c, self.head, slot, self.columns] = tile

        if self.end_ref is not None:

            @pl.when(last)
            def _():
                self.end_ref[0, 0, slot, :] = tile

    def _slices(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Runs body(slot, carry) for every slice, behind a barrier: the last loop's writes are every thread's."""
        if not self.plan.interpret:
            pltriton.debug_barrier()
        count = self.plan.keys // BLOCK
        return jax.lax.fori_loop(0, count, lambda s, carry: body(pl.ds(s * BLOCK, BLOCK), carry), carry)
