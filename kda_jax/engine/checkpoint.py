"""A model's state in the form that a cache keeps: leaves by name, and pages of latent rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cache import Payload
from kda_jax.state import MLAState, ModelState
from kda_jax.weights.statefile import state_from_leaves
from pallas_kernels.state_compression import CompressedState, compress_state, decompress_state

_compress, _decompress = jax.jit(compress_state), jax.jit(decompress_state)


class Checkpoint(NamedTuple):
    """What `cut` made of a state, and what `join` makes one of again.

    Attributes:
        state: by name, `layers.{i}.recurrent`, `.conv` and `.position` of a KDA layer, `.latent` (the rows behind the
            last whole page) and `.position` of an MLA layer. In int8, `layers.{i}.recurrent.values` and `.scales`
            stand for `.recurrent`.
        pages: rows [page * n, page * (n + 1)) of each MLA layer by the name `layers.{i}.latent`, in order.
    """

    state: dict[str, jax.Array]
    pages: list[dict[str, jax.Array]]


def cut(state: ModelState, page: int, *, after: int = 0, int8: bool = False) -> Checkpoint:
    """Copies what is alive in a state. Nothing is shared: whoever goes on from the state may give its buffers up.

    Args:
        state: of one row, [1, ...] in every leaf.
        page: latent rows a page.
        after: tokens whose pages are held already: whole pages before it are left out.
        int8: with recurrent states in int8, a quarter of their bytes. Such a checkpoint is not exact, and belongs in
            a namespace of its own (`Namespace.state_dtype`).

    Raises:
        ValueError: for several rows, for a page that is not positive, and for a negative `after`.
    """
    if state.position.shape != (1,):
        raise ValueError(
            f"a checkpoint has one row, got {state.position.shape[0]}: take a row of every leaf first"
        )
    if page < 1 or after < 0:
        raise ValueError(f"{page=} must be positive and {after=} not negative")
    tokens = int(np.asarray(state.position)[0])
    pages: list[dict[str, jax.Array]] = [{} for _ in range(after // page, tokens // page)]
    leaves: dict[str, jax.Array] = {}
    for i, layer in enumerate(state.layers):
        leaves[f"layers.{i}.position"] = jnp.copy(layer.position)
        if isinstance(layer, MLAState):
            name = f"layers.{i}.latent"
            leaves[name] = _rows(layer.latent, tokens // page * page, tokens % page)
            for n, rows in enumerate(pages, start=after // page):
                rows[name] = _rows(layer.latent, n * page, page)
            continue
        leaves[f"layers.{i}.conv"] = jnp.copy(layer.conv)
        name = f"layers.{i}.recurrent"
        if int8:
            leaves[f"{name}.values"], leaves[f"{name}.scales"] = _compress(layer.recurrent)
        else:
            leaves[name] = jnp.copy(layer.recurrent)
    return Checkpoint(leaves, pages)


def join(state: Payload, pages: Sequence[Payload]) -> ModelState:
    """The state that `cut` took apart: a private copy with room for its own tokens and no more.

    Args:
        state: `Checkpoint.state`, as `cache.load` gives it back; of jax or of numpy.
        pages: all of them, from the first.

    Raises:
        WeightsError: if a leaf is missing or surplus.
        ValueError: if the rows of latents are not as many as the tokens, and for payloads that are no arrays.
    """
    arrays, leaves, by_page = {}, _by_name(state), [_by_name(rows) for rows in pages]
    for name, leaf in leaves.items():
        whole, _, part = name.rpartition(".")
        if part == "latent":
            before = (rows[name] for rows in by_page if name in rows)
            arrays[name] = jnp.concatenate([*before, jnp.copy(leaf)], axis=1)
        elif part == "values" and f"{whole}.scales" in leaves:
            scales = jnp.asarray(leaves[f"{whole}.scales"])
            arrays[whole] = _decompress(CompressedState(jnp.asarray(leaf), scales))
        elif part != "scales" or f"{whole}.values" not in leaves:
            arrays[name] = jnp.copy(leaf)
    joined = state_from_leaves(arrays, "the checkpoint")
    tokens = int(np.asarray(joined.position)[0])
    for layer in joined.layers:
        if isinstance(layer, MLAState) and layer.latent.shape[1] != tokens:
            raise ValueError(
                f"a checkpoint of {tokens} tokens came with {layer.latent.shape[1]} rows of latents: pass all its "
                "pages, and no others"
            )
    return joined


def _by_name(payload: Payload) -> Mapping[str, jax.Array | np.ndarray]:
    if not isinstance(payload, Mapping):
        raise ValueError(
            f"join needs arrays by name, got {type(payload).__name__}: read them from storage first"
        )
    return payload


def _rows(latent: jax.Array, start: int, count: int) -> jax.Array:
    """A copy of `count` rows from `start`: a slice that is all of an array would be the array itself, and one with
    static bounds a program for each page."""
    return jax.lax.dynamic_slice_in_dim(latent, start, count, axis=1)
