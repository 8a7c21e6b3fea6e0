"""Blocks of latent rows, from a contiguous buffer or through a page table."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Where the latent rows of a batch lie.

    Attributes:
        data: [B, S, C], or the pool [pages, page_size, C] when there is a table.
        page_table: [B, n] int32, or None.
    """

    data: jax.Array
    page_table: jax.Array | None

    @property
    def capacity(self) -> int:
        """Rows that one sequence can have."""
        return self.data.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    def read(self, sequence: jax.Array, index: jax.Array, size: int, written: jax.Array | None) -> jax.Array:
        """Returns rows index*size .. of a sequence, [size, C].

        Rows from `written` on are 0, whatever lies there; None promises that all of the block is written.
        """
        first = index * size
        read = self._contiguous if self.page_table is None else self._paged
        rows = read(sequence, first, size)
        if written is None:
            return rows
        live = first + jnp.arange(size, dtype=jnp.int32) < written
        return jnp.where(live[:, None], rows, 0)

    def _contiguous(self, sequence: jax.Array, first: jax.Array, size: int) -> jax.Array:
        capacity = self.data.shape[1]
        if capacity < size:
            rows = jax.lax.dynamic_index_in_dim(self.data, sequence, keepdims=False)
            return jnp.pad(rows, ((0, size - capacity), (0, 0)))
        if capacity % size == 0:
            return jax.lax.dynamic_slice(self.data, (sequence, first, 0), (1, size, self.data.shape[2]))[0]
        # A block that sticks out of the buffer is read from further down and moved up.
        low = jnp.minimum(first, capacity - size)
        rows = jax.lax.dynamic_slice(self.data, (sequence, low, 0), (1, size, self.data.shape[2]))[0]
        return jax.lax.dynamic_slice_in_dim(jnp.pad(rows, ((0, size), (0, 0))), first - low, size)

    def _paged(self, sequence: jax.Array, first: jax.Array, size: int) -> jax.Array:
        page_size, channels = self.data.shape[1:]
        table = jax.lax.dynamic_index_in_dim(self.page_table, sequence, keepdims=False)
        if page_size % size == 0:
            page = table[first // page_size]
            return jax.lax.dynamic_slice(self.data, (page, first % page_size, 0), (1, size, channels))[0]
        row = jnp.minimum(first + jnp.arange(size, dtype=jnp.int32), self.capacity - 1)
        if size % page_size == 0:
            return self.data[table[row[::page_size] // page_size]].reshape(size, channels)
        return self.data[table[row // page_size], row % page_size]

    def scatter(self, by_sequence: jax.Array) -> jax.Array:
        """Sums [B, >= capacity, C] back to the shape of `data`: the transpose of reading every row once."""
        by_sequence = by_sequence[:, : self.capacity]
        if self.page_table is None:
            return by_sequence
        pages = by_sequence.reshape(*self.page_table.shape, *self.data.shape[1:])
        return jnp.zeros(self.data.shape, by_sequence.dtype).at[self.page_table].add(pages)
