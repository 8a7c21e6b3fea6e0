"""What a model remembers between calls: one fixed-size state a KDA layer, a growing cache of latents an MLA
layer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kda_jax.config import ModelConfig


class KDAState(NamedTuple):
    """State of one KDA layer after `position` tokens.

    `recurrent` is float32. `conv` holds the last W-1 inputs of the short convolution, before the activation,
    oldest first, channels q | k | v.
    """

    recurrent: Float[Array, "B HV K V"]
    conv: Float[Array, "B W C"]
    position: Int[Array, "B"]


class MLAState(NamedTuple):
    """Latents of one MLA layer: rows [0, position) are the sequence's, rows beyond are dead and hold
    anything."""

    latent: Float[Array, "B S L"]
    position: Int[Array, "B"]


class SlottedKDAState(NamedTuple):
    """State of one KDA layer for B of the sequences whose states lie side by side in slots.

    Row b is that of slot `slots[b]`, no slot twice; a negative one marks a row of padding, which reads and writes
    nothing. `recurrent` and `conv` are as in `KDAState`. A call of one token a row moves the slots on; more are drafts,
    of which it is not known yet how many count: the slots stay as they are, and a `DraftedKDAState` comes back.
    """

    recurrent: Float[Array, "slots HV K V"]
    conv: Float[Array, "slots W C"]
    slots: Int[Array, "B"]
    position: Int[Array, "B"]


class DraftedKDAState(NamedTuple):
    """State of one KDA layer after each of M drafts, to choose from by `pallas_kernels.kda_accept`.

    `recurrent` and `conv` are as in `KDAState`; `position` is that before the drafts.
    """

    recurrent: Float[Array, "B M HV K V"]
    conv: Float[Array, "B M W C"]
    position: Int[Array, "B"]


class PagedMLAState(NamedTuple):
    """Latents of one MLA layer for B of the sequences that share a pool of pages of R rows.

    Row t of sequence b is row t % R of page `table[b, t // R]`. Rows from the position on are dead and hold
    anything. Page 0 is nobody's: what padding writes goes there.
    """

    latent: Float[Array, "pages R L"]
    table: Int[Array, "B n"]
    position: Int[Array, "B"]


class PooledState(NamedTuple):
    """The states of all layers, with latents in pages and, where one token or drafts are read, KDA's states in slots.

    In a jitted function that gives up the pools' buffers, a call writes only the rows it adds.
    """

    layers: tuple[KDAState | SlottedKDAState | DraftedKDAState | PagedMLAState, ...]

    @property
    def position(self) -> Int[Array, "B"]:
        """int32: tokens each row has absorbed; the same in every layer."""
        return self.layers[0].position


class ModelState(NamedTuple):
    """The states of all layers. A checkpoint is one of these too: it may share its latents with other
    states."""

    layers: tuple[KDAState | MLAState, ...]

    @property
    def position(self) -> Int[Array, "B"]:
        """int32: tokens each row has absorbed; the same in every layer."""
        return self.layers[0].position

    @property
    def capacity(self) -> int | None:
        """Tokens a row has room for, or None when no layer caches tokens."""
        rows = [layer.latent.shape[-2] for layer in self.layers if isinstance(layer, MLAState)]
        return min(rows) if rows else None


def empty_kda(config: ModelConfig, batch: int, dtype: DTypeLike = jnp.float32) -> KDAState:
    """A KDA layer's state before the first token; `dtype` is the convolution window's."""
    return KDAState(
        jnp.zeros((batch, config.kda_value_heads, config.kda_head_dim, config.kda_value_dim), jnp.float32),
        jnp.zeros((batch, config.conv_size - 1, config.conv_channels), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


def empty_mla(config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike = jnp.float32) -> MLAState:
    """An MLA layer's state before the first token, with room for `capacity` tokens a row."""
    return MLAState(jnp.zeros((batch, capacity, config.latent_size), dtype), jnp.zeros((batch,), jnp.int32))


def empty(config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike = jnp.float32) -> ModelState:
    """The state of a model before the first token.

    Args:
        config: the model's config.
        batch: number of rows (B).
        capacity: tokens each row has room for (S); `grow` makes more.
        dtype: of the latents and of the convolution windows, the model's own; the recurrent state is float32.

    Raises:
        ValueError: if `batch` or `capacity` is not positive.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"{batch=} and {capacity=} must be positive")
    return ModelState(
        tuple(
            empty_kda(config, batch, dtype) if kind == "kda" else empty_mla(config, batch, capacity, dtype)
            for kind in config.layers
        )
    )


def grow(state: ModelState, capacity: int) -> ModelState:
    """The same state with room for at least `capacity` tokens a row; itself when it has that already."""

    def layer(old: KDAState | MLAState) -> KDAState | MLAState:
        if isinstance(old, KDAState) or old.latent.shape[-2] >= capacity:
            return old
        more = capacity - old.latent.shape[-2]
        return old._replace(latent=jnp.pad(old.latent, ((0, 0), (0, more), (0, 0))))

    return ModelState(tuple(layer(old) for old in state.layers))


def nbytes(config: ModelConfig, num_tokens: int, batch: int = 1, dtype: DTypeLike = jnp.float32) -> int:
    """Bytes of a state that has room for exactly `num_tokens` tokens a row, from shapes alone."""
    shapes = jax.eval_shape(lambda: empty(config, batch, num_tokens, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
