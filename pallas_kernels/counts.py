"""Token counts and positions that callers hand in: lists, NumPy or JAX arrays become checked int32 arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Counts = jax.Array | np.ndarray | Sequence[int] | Sequence[Sequence[int]]


def as_counts(name: str, values: Counts, shape: tuple[int, ...], *, limit: int | None = None) -> jax.Array:
    """Returns int32 counts of the given shape; values are checked where they are known (outside jit).

    Args:
        name: what the message calls them, as "short_conv: lengths".
        values: the counts.
        shape: what they must have; [NB] is repeated for every row when two axes are wanted.
        limit: the largest count allowed; 0 is the smallest.

    Raises:
        ValueError: another shape, or a known value outside 0..limit.
    """
    array = jnp.asarray(values, jnp.int32)
    if array.ndim == 1 and len(shape) == 2:
        array = jnp.broadcast_to(array, (shape[0], *array.shape))
    if array.ndim != len(shape) or any(want not in (-1, have) for want, have in zip(shape, array.shape)):
        wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} must be int32 of shape [{wanted}], got {list(array.shape)}")
    if limit is not None and not isinstance(array, Tracer):
        host = np.asarray(array)
        if host.size and (host.min() < 0 or host.max() > limit):
            raise ValueError(f"{name} must lie in 0..{limit}, got {host.tolist()}")
    return array


def as_cu_seqlens(name: str, values: Counts, num_tokens: int) -> jax.Array:
    """Returns cumulated sequence lengths [N+1] as int32, checked where they are known.

    Raises:
        ValueError: fewer than two entries, or known values that do not rise from 0 to at most `num_tokens`.
    """
    array = jnp.asarray(values, jnp.int32)
    if array.ndim != 1 or array.shape[0] < 2:
        raise ValueError(f"{name} must be [N+1] with N >= 1, got shape {list(array.shape)}")
    if not isinstance(array, Tracer):
        host = np.asarray(array)
        if host[0] != 0 or (np.diff(host) < 0).any() or host[-1] > num_tokens:
            raise ValueError(f"{name} must rise from 0 to at most {num_tokens} tokens, got {host.tolist()}")
    return array


def as_slots(name: str, values: Counts, rows: int, size: int) -> jax.Array:
    """Returns places in a pool of `size`, int32 [rows], checked where they are known: a kernel would write there.

    Raises:
        ValueError: another shape, a known place behind the pool, or one named twice; negative ones name none.
    """
    array = as_counts(name, values, (rows,))
    if not isinstance(array, Tracer):
        host = np.asarray(array)
        used = host[host >= 0]
        if (used >= size).any() or len(np.unique(used)) < len(used):
            raise ValueError(f"{name} must be below S={size} and none twice, got {host.tolist()}")
    return array
