"""Which tokens each chunk of a call holds: the one table that all kernels read."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.reference import Pack


class Table(NamedTuple):
    """C chunks of N sequences, those of one sequence side by side; the last few may hold no token."""

    token: jax.Array  # [C] int32: the chunk's first row on the flat token axis
    live: jax.Array  # [C] int32: how many rows from there on are its own
    first: jax.Array  # [N + 2] int32: sequence n has chunks first[n] to first[n + 1]; the last entry is -1


def whole_rows(batch: int, tokens: int) -> Pack:
    """The sequences of a batch of whole rows that begin with the call, as NumPy arrays: they are known now."""
    first = np.arange(batch, dtype=np.int32) * tokens
    known: list[Any] = [first, np.full_like(first, tokens), np.zeros_like(first)]
    return Pack(*known)


def make_table(pack: Pack, num_tokens: int, chunk: int) -> Table:
    """The table for sequences on a token axis of `num_tokens` rows, anchored at token 0 of each sequence.

    Its length is static: a sequence has at most one partial chunk at either end. Of `whole_rows`
    it is made here and now, and costs the program no kernel.
    """
    xp: ModuleType = np if isinstance(pack.first, np.ndarray) else jnp
    lead = pack.start % chunk
    counts = xp.where(pack.count > 0, (lead + pack.count + chunk - 1) // chunk, 0)
    first = xp.concatenate([xp.zeros((1,), xp.int32), xp.cumsum(counts, dtype=xp.int32)])
    number = xp.arange(num_chunks(pack.first.shape[0], num_tokens, chunk), dtype=xp.int32)
    owner = xp.clip(xp.searchsorted(first, number, side="right") - 1, 0, pack.first.shape[0] - 1)
    within = (number - first[owner]) * chunk - lead[owner]
    begin = xp.clip(within, 0, pack.count[owner])
    end = xp.clip(within + chunk, 0, pack.count[owner])
    live = xp.where(number < first[-1], end - begin, 0)
    # The -1 keeps the rows' chunks from being an arithmetic series, for which XLA would launch a kernel.
    columns = (pack.first[owner] + begin, live, xp.append(first, xp.int32(-1)))
    return Table(*(jnp.asarray(column, jnp.int32) for column in columns))


class Marks(NamedTuple):
    """Where the states at NB boundaries of N sequences come from: a chunk that ends there, beside the chunk it is cut
    from."""

    holder: jax.Array  # [N, NB] int32: the chunk that holds the boundary's last token; -1 at boundary 0
    chunk: jax.Array  # [N, NB] int32: the number of the chunk that ends there


def mark(table: Table, pack: Pack, boundaries: jax.Array, chunk: int) -> tuple[Table, Marks]:
    """Adds a chunk that ends there for every boundary, [N, NB] token counts of this call; behind a sequence's end they
    mean its end."""
    if not boundaries.size:
        return table, Marks(boundaries, boundaries)
    counts = jnp.minimum(boundaries, pack.count[:, None])
    lead = (pack.start % chunk)[:, None]
    within = jnp.maximum(lead + counts - 1, 0) // chunk
    begin = jnp.maximum(within * chunk - lead, 0)
    holder = jnp.where(counts > 0, table.first[:-2, None] + within, -1)
    number = table.token.shape[0] + jnp.arange(counts.size, dtype=jnp.int32).reshape(counts.shape)
    token = jnp.concatenate([table.token, (pack.first[:, None] + begin).reshape(-1)])
    live = jnp.concatenate([table.live, jnp.where(counts > 0, counts - begin, 0).reshape(-1)])
    return Table(token, live, table.first), Marks(holder, number)


def num_chunks(sequences: int, num_tokens: int, chunk: int) -> int:
    """How many chunks the table has room for."""
    return num_tokens // chunk + 2 * sequences
