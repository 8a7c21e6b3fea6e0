"""What the device does in the engine's steps, as pure functions of the memory; `programs` compiles them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from kda_jax.engine.memory import Memory
from kda_jax.engine.snapshot import put_slot, save
from kda_jax.forward import Params
from kda_jax.model import Model
from kda_jax.sampling import RowSamplers, sample_rows
from kda_jax.state import DraftedKDAState, KDAState, PagedMLAState, PooledState, SlottedKDAState
from pallas_kernels import kda_accept
from pallas_kernels.buffers import zeros_after


def decode(
    graphdef: nnx.GraphDef[Model],
    params: Params,
    memory: Memory,
    tokens: jax.Array,
    slots: jax.Array,
    table: jax.Array,
    position: jax.Array,
    samplers: RowSamplers,
) -> tuple[Memory, jax.Array, jax.Array]:
    """Absorbs one token a row and chooses the next.

    Args:
        graphdef, params: the model.
        memory: what the rows have absorbed.
        tokens, slots, position: int32 [B]. Rows of padding have slot 0 and position 0.
        table: int32 [B, n], the rows' pages; 0 in rows of padding.
        samplers: how to choose.

    Returns:
        the memory, the tokens int32 [B], and the logits they were chosen from, float32 [B, vocab].
    """
    model = nnx.merge(graphdef, params)
    state = _in_slots(model, memory, slots, table, position)
    logits, state = model(tokens[:, None], state)
    memory, kda_states = _taken_apart(state)
    memory = memory._replace(
        recurrent=tuple(layer.recurrent for layer in kda_states),
        conv=tuple(layer.conv for layer in kda_states),
    )
    return memory, sample_rows(logits[:, 0], samplers, position + 1), logits[:, 0]


def verify(
    graphdef: nnx.GraphDef[Model],
    params: Params,
    memory: Memory,
    tokens: jax.Array,
    lengths: jax.Array,
    slots: jax.Array,
    table: jax.Array,
    position: jax.Array,
    samplers: RowSamplers,
) -> tuple[Memory, jax.Array, jax.Array, jax.Array]:
    """Absorbs one token a row and as many drafts behind it as are what `decode` would choose, one after the other.

    The model reads all tokens at once. A draft counts if it is the token chosen behind the one before it, and that
    counts; the memory is left at the last that does. Latents behind it are dead.

    Args:
        graphdef, params: the model.
        memory: what the rows have absorbed.
        tokens: int32 [B, T], a row's token and its drafts.
        lengths: int32 [B], tokens and drafts that there are, 1..T; 0 in rows of padding.
        slots, table, position, samplers: as in `decode`.

    Returns:
        the memory, the tokens chosen behind each, int32 [B, T], how many drafts count, int32 [B], and the logits,
        float32 [B, T, vocab].
    """
    model = nnx.merge(graphdef, params)
    state = _in_slots(model, memory, slots, table, position)
    logits, state = model(tokens, state, lengths)
    rows, count = tokens.shape
    behind = position[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)
    each = RowSamplers(*(jnp.repeat(jnp.asarray(x), count) for x in samplers))
    chosen = sample_rows(logits.reshape(rows * count, -1), each, behind.reshape(-1)).reshape(rows, count)
    there = jnp.arange(1, count, dtype=jnp.int32) < lengths[:, None]
    right = there & (tokens[:, 1:] == chosen[:, :-1])
    accepted = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    return _accept(memory, state, accepted + 1, slots), chosen, accepted, logits


def prefill(
    graphdef: nnx.GraphDef[Model],
    params: Params,
    memory: Memory,
    tokens: jax.Array,
    length: jax.Array,
    slot: jax.Array,
    table: jax.Array,
    position: jax.Array,
    boundaries: jax.Array,
    pages: jax.Array,
    samplers: RowSamplers,
) -> tuple[Memory, jax.Array, jax.Array]:
    """Absorbs a chunk of one sequence, saves its state at boundaries, and chooses the token behind the chunk.

    Args:
        graphdef, params: the model.
        memory: what the sequence has absorbed.
        tokens: int32 [T], of which `length` count.
        length, slot, position: int32 [].
        table: int32 [n], the sequence's pages, with room for the chunk.
        boundaries: int32 [NB], token counts of the chunk, 1..length; NB may be 0.
        pages: int32 [NB, k + 1], where each snapshot goes; rows of page 0 for padding.
        samplers: how to choose, of one row.

    Returns:
        as `decode`, of one row: the memory, int32 [1], and float32 [1, vocab].
    """
    at = position[None]

    def kda(recurrent: jax.Array, conv: jax.Array) -> KDAState:
        return KDAState(_row(recurrent, slot), _row(conv, slot), at)

    model = nnx.merge(graphdef, params)
    state = _state(model, memory, table[None], at, list(map(kda, memory.recurrent, memory.conv)))
    cuts = boundaries[None] if boundaries.size else None
    logits, state, *cut = model(tokens[None], state, length[None], cuts, last_only=True)
    pools, kda_states = _taken_apart(state)
    memory = memory._replace(planes=pools.planes)
    memory = put_slot(
        memory, slot, [layer.recurrent for layer in kda_states], [layer.conv for layer in kda_states]
    )
    if cut:
        # Written when all is read: the compiler copies a plane that might be read while it is written, and removes a
        # barrier before it looks.
        pages = pages + zeros_after(logits, pages.shape, jnp.int32)
        _, ats = _taken_apart(cut[0])
        memory = save(
            memory,
            [layer.recurrent[0] for layer in ats],
            [layer.conv[0] for layer in ats],
            table,
            position + boundaries,
            pages,
        )
    return memory, sample_rows(logits[:, 0], samplers, at + length), logits[:, 0]


def snapshot(
    memory: Memory, slot: jax.Array, table: jax.Array, position: jax.Array, pages: jax.Array
) -> Memory:
    """Saves the state of a slot: slot and position int32 [], table int32 [n], pages int32 [k + 1]."""
    recurrent, conv = ([_row(pool, slot) for pool in pools] for pools in (memory.recurrent, memory.conv))
    return save(memory, recurrent, conv, table, position[None], pages[None])


def zero(memory: Memory, slot: jax.Array) -> Memory:
    """Makes a slot, int32 [], that of a sequence before its first token."""
    recurrent, conv = (
        [jnp.zeros_like(pool[:1]) for pool in pools] for pools in (memory.recurrent, memory.conv)
    )
    return put_slot(memory, slot, recurrent, conv)


def _row(pool: jax.Array, slot: jax.Array) -> jax.Array:
    """A slot's entry, [1, ...]."""
    return jax.lax.dynamic_slice_in_dim(pool, slot, 1, axis=0)


def _state(
    model: Model,
    memory: Memory,
    table: jax.Array,
    position: jax.Array,
    kda_states: Sequence[KDAState | SlottedKDAState],
) -> PooledState:
    """The model's state over the memory."""
    kda, planes = iter(kda_states), iter(memory.planes)
    return PooledState(
        tuple(
            next(kda) if kind == "kda" else PagedMLAState(next(planes), table, position)
            for kind in model.config.layers
        )
    )


def _in_slots(
    model: Model, memory: Memory, slots: jax.Array, table: jax.Array, position: jax.Array
) -> PooledState:
    """The model's state of rows in slots, slot 0 for padding."""
    kda = [
        SlottedKDAState(recurrent, conv, _places(slots), position)
        for recurrent, conv in zip(memory.recurrent, memory.conv)
    ]
    return _state(model, memory, table, position, kda)


def _places(slots: jax.Array) -> jax.Array:
    """The slots as kernels have them: a negative one for padding."""
    return jnp.where(slots == 0, -1, slots)


def _accept(memory: Memory, state: PooledState, counts: jax.Array, slots: jax.Array) -> Memory:
    """The memory behind the first `counts` tokens, int32 [B], of those that `state` has read as drafts."""
    pools, layers = _taken_apart(state)
    recurrent, conv = [], []
    for layer, states, windows in zip(layers, memory.recurrent, memory.conv, strict=True):
        states, windows = kda_accept(
            states, windows, layer.recurrent, layer.conv, counts, slots=_places(slots)
        )
        recurrent.append(states)
        conv.append(windows)
    return pools._replace(recurrent=tuple(recurrent), conv=tuple(conv))


def _taken_apart(
    state: PooledState,
) -> tuple[Memory, list[KDAState | SlottedKDAState | DraftedKDAState]]:
    """The planes, and the states of KDA layers."""
    planes = tuple(layer.latent for layer in state.layers if isinstance(layer, PagedMLAState))
    return Memory(planes, (), ()), [layer for layer in state.layers if not isinstance(layer, PagedMLAState)]
