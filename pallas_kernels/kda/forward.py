"""A call in chunks: one loop over the chunks of each sequence.

Everything a chunk needs is sliced from the inputs inside the loop and stays in cache; nothing the size of the sequence
is written but the output.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.buffers import zeros_after
from pallas_kernels.kda.chunk import Chunk, both, chunk_matrices, columns_product, product, unit_lower_inverse
from pallas_kernels.kda.grid import Form, Inputs, Row, extent, load, num_groups, pad, room, row_of, store
from pallas_kernels.kda.reference import Pack


def read_group(
    form: Form, inputs: Inputs, row: Row | None, group: jax.Array
) -> tuple[Inputs, Chunk, jax.Array]:
    """A group's inputs, and what can be known of its chunks before the state arrives."""
    x = load(inputs, row, group, form)
    chunk, _ = chunk_matrices(x.q, x.k, x.g, form.bounded)
    return x, chunk, unit_lower_inverse(x.beta[..., None] * chunk.pairs[..., 0, :, :])


def read_state(
    chunk: Chunk, inverse: jax.Array, v: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a chunk's tokens read from the state it meets, [.., L, V], and what they write, u [.., L, V]."""
    length = v.shape[-2]
    reads = product(both(chunk.reads), state)
    u = product(inverse, beta[..., None] * (v - reads[..., :length, :]))
    return reads[..., length:, :] + product(chunk.pairs[..., 1, :, :], u), u


def next_state(chunk: Chunk, u: jax.Array, state: jax.Array) -> jax.Array:
    """The state behind a chunk, from what its tokens wrote."""
    return chunk.decay[..., None] * state + columns_product(chunk.ke, u)


def run_group(form: Form, inputs: Inputs, row: Row | None, group, state, out):
    """Advances the state over one group; returns it with the output buffer."""
    x, chunk, inverse = read_group(form, inputs, row, group)

    def advance(state, xs):
        chunk, inverse, v, beta = xs
        out, u = read_state(chunk, inverse, v, beta, state)
        return next_state(chunk, u, state), out

    state, outs = jax.lax.scan(advance, state, (chunk, inverse, x.v, x.beta))
    return state, store(out, outs * form.scale, row, group, form, rising=True)


def over_sequences(pack: Pack, states: jax.Array, run, carry):
    """For each sequence n in turn: state, carry = run(n, states[n], carry)."""

    def one(n, both):
        finals, carry = both
        state, carry = run(n, jax.lax.dynamic_index_in_dim(states, n, keepdims=False), carry)
        return jax.lax.dynamic_update_slice_in_dim(finals, state[None], n, 0), carry

    if states.shape[0] == 1:
        return one(0, (states, carry))
    return jax.lax.fori_loop(0, states.shape[0], one, (states, carry))


def forward(form: Form, inputs: Inputs, states: jax.Array, pack: Pack | None) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, V] and the final states: of a grid [B * H, K, V], of a pack [N, H, K, V]."""
    tokens = inputs.v.shape[1]
    padded = Inputs(*(pad(x, pack, form) for x in inputs))
    out = zeros_after(inputs.v, room(inputs.v, pack, form), jnp.float32)

    def loop(row: Row | None, groups: jax.Array | int, state: jax.Array, out: jax.Array):
        def advance(i: jax.Array, carry: tuple[jax.Array, jax.Array]):
            state, out = carry
            return run_group(form, padded, row, i, state, out)

        return jax.lax.fori_loop(0, groups, advance, (state, out))

    if pack is None:
        final, out = loop(None, padded.v.shape[1] // (form.chunk * form.group), states, out)
    else:
        groups = num_groups(pack, form)
        final, out = over_sequences(
            pack, states, lambda n, state, out: loop(row_of(pack, n, form), groups[n], state, out), out
        )
    return out[:, :tokens], final


class Due(NamedTuple):
    """The boundaries of one loop over chunks."""

    counts: jax.Array  # [M] tokens of this call, rising
    slots: jax.Array  # [M] where each one's state belongs: sequence * NB + boundary
    lanes: jax.Array  # [M] which of the sequences that advance together it belongs to


def forward_at(
    form: Form, inputs: Inputs, states: jax.Array, pack: Pack | None, boundaries: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `forward`, chunk by chunk (`form.group` is 1), also returning the states at boundaries, [N, NB, H, K, V].

    A boundary's state is made when the loop is at the chunk that holds it, so that boundaries cost by their number and
    not by the sequence's length.
    """
    tokens = inputs.v.shape[1]
    padded = Inputs(*(pad(x, pack, form) for x in inputs))
    out = zeros_after(inputs.v, room(inputs.v, pack, form), jnp.float32)
    slots = jnp.arange(boundaries.size, dtype=jnp.int32).reshape(boundaries.shape)
    at = jnp.repeat(states, boundaries.shape[1], axis=0)
    heads = states.shape[1]

    def loop(row: Row | None, groups, due: Due, state, carry):
        def advance(i, carry):
            state, out, at, seen = carry
            x, chunk, inverse = read_group(form, padded, row, i)
            x, chunk, inverse = jax.tree.map(lambda x: x[0], (x, chunk, inverse))
            outs, u = read_state(chunk, inverse, x.v, x.beta, state)
            out = store(out, outs[None] * form.scale, row, i, form, rising=True)
            begin, end = (i * form.chunk, (i + 1) * form.chunk) if row is None else extent(row, i, form)

            def is_due(carry):
                seen = carry[1]
                return (seen < due.counts.size) & (due.counts[jnp.minimum(seen, due.counts.size - 1)] <= end)

            def snapshot(carry):
                at, seen = carry
                k, g, u_, met = (
                    jax.lax.dynamic_slice_in_dim(x, due.lanes[seen] * heads, heads)
                    for x in (x.k, x.g, u, state)
                )
                here = _state_inside(form, k, g, u_, due.counts[seen] - begin, met)
                return jax.lax.dynamic_update_slice_in_dim(at, here[None], due.slots[seen], 0), seen + 1

            at, seen = jax.lax.while_loop(is_due, snapshot, (at, seen))
            # The states are taken before this one is overwritten: else XLA copies it for every chunk.
            seen, u = jax.lax.optimization_barrier((seen, u))
            return next_state(chunk, u, state), out, at, seen

        state, out, at, _ = jax.lax.fori_loop(0, groups, advance, (state, *carry, jnp.int32(0)))
        return state, (out, at)

    if pack is None:
        flat = boundaries.reshape(-1)
        order = jnp.argsort(flat)
        due = Due(flat[order], order, order // boundaries.shape[1])
        joined = states.reshape(-1, *states.shape[2:])
        final, (out, at) = loop(None, padded.v.shape[1] // form.chunk, due, joined, (out, at))
        final = final.reshape(states.shape)
    else:
        groups = num_groups(pack, form)
        order = jnp.argsort(boundaries, axis=1)
        counts = jnp.minimum(jnp.take_along_axis(boundaries, order, axis=1), pack.count[:, None])
        due = Due(counts, jnp.take_along_axis(slots, order, axis=1), jnp.zeros_like(slots))
        final, (out, at) = over_sequences(
            pack,
            states,
            lambda n, state, carry: loop(
                row_of(pack, n, form), groups[n], jax.tree.map(lambda x: x[n], due), state, carry
            ),
            (out, at),
        )
    return out[:, :tokens], final, at.reshape(*boundaries.shape, *states.shape[1:])


def _state_inside(
    form: Form, k: jax.Array, g: jax.Array, u: jax.Array, rows: jax.Array, state: jax.Array
) -> jax.Array:
    """The state after the first `rows` tokens of a chunk: the bits of a call that ends there."""
    live = (jnp.arange(form.chunk) < rows)[:, None]
    k, g, u = (jnp.where(live, y, 0.0) for y in (k, g, u))
    return next_state(chunk_matrices(k, k, g, form.bounded)[0], u, state)
