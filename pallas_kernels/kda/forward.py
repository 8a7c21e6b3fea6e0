"""A call in chunks: one loop over the chunks of each sequence.

Everything a chunk needs is sliced from the inputs inside the loop and stays in cache; nothing the size of the sequence
is written but the output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.buffers import zeros_after
from pallas_kernels.kda.chunk import Chunk, both, chunk_matrices, columns_product, product, unit_lower_inverse
from pallas_kernels.kda.grid import Form, Inputs, Row, extent, load, num_groups, pad, row_of, store
from pallas_kernels.kda.reference import Pack


def advance_chunk(
    chunk: Chunk, inverse: jax.Array, v: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs one chunk over the state it meets: out [.., L, V], u [.., L, V] and the next state."""
    length = v.shape[-2]
    reads = product(both(chunk.reads), state)
    u = product(inverse, beta[..., None] * (v - reads[..., :length, :]))
    out = reads[..., length:, :] + product(chunk.pairs[..., 1, :, :], u)
    return out, u, next_state(chunk, u, state)


def next_state(chunk: Chunk, u: jax.Array, state: jax.Array) -> jax.Array:
    """The state behind a chunk, from what its tokens wrote."""
    return chunk.decay[..., None] * state + columns_product(chunk.ke, u)


def run_group(form: Form, inputs: Inputs, row: Row | None, group, state, out):
    """Advances the state over one group; returns it with the output buffer, the inputs read and every u."""
    x = load(inputs, row, group, form)
    chunk, _ = chunk_matrices(x.q, x.k, x.g, form.bounded)
    inverse = unit_lower_inverse(x.beta[..., None] * chunk.pairs[..., 0, :, :])

    def advance(state, xs):
        chunk, inverse, v, beta = xs
        out, u, state = advance_chunk(chunk, inverse, v, beta, state)
        return state, (out, u)

    state, (outs, us) = jax.lax.scan(advance, state, (chunk, inverse, x.v, x.beta))
    return state, store(out, outs * form.scale, row, group, form), x, us


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
    padded = pad(inputs, pack, form)
    out = zeros_after(inputs.v, padded.v.shape, jnp.float32)

    def loop(row: Row | None, groups: jax.Array | int, state: jax.Array, out: jax.Array):
        def advance(i: jax.Array, carry: tuple[jax.Array, jax.Array]):
            state, out = carry
            return run_group(form, padded, row, i, state, out)[:2]

        return jax.lax.fori_loop(0, groups, advance, (state, out))

    if pack is None:
        final, out = loop(None, padded.v.shape[1] // (form.chunk * form.group), states, out)
    else:
        groups = num_groups(pack, form)
        final, out = over_sequences(
            pack, states, lambda n, state, out: loop(row_of(pack, n, form), groups[n], state, out), out
        )
    return out[:, :tokens], final


def forward_at(
    form: Form, inputs: Inputs, states: jax.Array, pack: Pack, boundaries: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `forward`, chunk by chunk (`form.group` is 1), also returning the states at boundaries, [N, NB, H, K, V].

    A boundary's state is made when the loop is at the chunk that holds it, so that boundaries cost by their number and
    not by the sequence's length.
    """
    tokens = inputs.v.shape[1]
    padded = pad(inputs, pack, form)
    out = zeros_after(inputs.v, padded.v.shape, jnp.float32)
    groups = num_groups(pack, form)
    order = jnp.argsort(boundaries, axis=1)
    due = jnp.minimum(jnp.take_along_axis(boundaries, order, axis=1), pack.count[:, None])
    num_due = boundaries.shape[1]

    def sequence(n, state, carry):
        row = row_of(pack, n, form)

        def advance(i, carry):
            state, out, at, seen = carry
            after, out, x, us = run_group(form, padded, row, i, state, out)
            begin, end = extent(row, i, form)

            def is_due(carry):
                _, seen = carry
                return (seen < num_due) & (due[n, jnp.minimum(seen, num_due - 1)] <= end)

            def snapshot(carry):
                at, seen = carry
                here = _state_inside(form, x, us, due[n, seen] - begin, state)
                return jax.lax.dynamic_update_slice(
                    at, here[None, None], (n, order[n, seen], 0, 0, 0)
                ), seen + 1

            at, seen = jax.lax.while_loop(is_due, snapshot, (at, seen))
            return after, out, at, seen

        state, out, at, _ = jax.lax.fori_loop(0, groups[n], advance, (state, *carry, jnp.int32(0)))
        return state, (out, at)

    at = jnp.repeat(states[:, None], num_due, axis=1)
    final, (out, at) = over_sequences(pack, states, sequence, (out, at))
    return out[:, :tokens], final, at


def _state_inside(form: Form, x: Inputs, u: jax.Array, rows: jax.Array, state: jax.Array) -> jax.Array:
    """The state after the first `rows` tokens of a group's only chunk: the bits of a call that ends there."""
    live = (jnp.arange(form.chunk) < rows)[:, None]
    k, g, u = (jnp.where(live, y[0], 0.0) for y in (x.k, x.g, u))
    return next_state(chunk_matrices(x.q[0], k, g, form.bounded)[0], u, state)
