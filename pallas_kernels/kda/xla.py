"""KDA in plain JAX: chunks of matrix products, one loop over the chunks of each sequence.

Everything a chunk needs is sliced from the inputs inside the loop and stays in cache; nothing the size of the sequence
is written but the output. Two layouts share the loop: the *grid* (a batch of whole rows that advance together) and the
*pack* (sequences one after the other on a flat token axis, each with its own chunk grid anchored at its token 0).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.chunk import Chunk, chunk_matrices, product, product_t, unit_lower_inverse
from pallas_kernels.kda.reference import Pack

MIN_LOG_DECAY = -1e4
"""exp of it is 0 in float32; keeps -inf out of sums and products, where 0 * inf would be NaN."""


class Inputs(NamedTuple):
    q: jax.Array  # [B, T, H, K], scaled
    k: jax.Array  # [B, T, H, K]
    v: jax.Array  # [B, T, H, V]
    g: jax.Array  # [B, T, H, K]
    beta: jax.Array  # [B, T, H]


class Form(NamedTuple):
    """The static choices of a call."""

    chunk: int  # tokens a chunk
    group: int  # chunks whose matrices are made together
    bounded: bool


class Row(NamedTuple):
    """One sequence of a pack: its rows on the flat token axis and how far into a chunk it resumes."""

    first: jax.Array
    count: jax.Array
    lead: jax.Array  # start modulo chunk


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    pack: Pack | None,
    boundaries: jax.Array | None,
    gate_lower_bound: float | None,
    chunk_size: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Backend "xla" of `kda_prefill`; q is scaled, heads of q, k and v are alike."""
    form = Form(chunk_size or 32, 1, gate_lower_bound is not None and gate_lower_bound >= -5.0)
    batch, tokens = q.shape[:2]
    inputs = Inputs(*(x.astype(jnp.float32) for x in (q, k, v, g, beta)))
    if pack is not None:
        inputs = Inputs(*(x.reshape(1, batch * tokens, *x.shape[2:]) for x in inputs))
    at = None
    if tokens == 0 or q.shape[0] == 0:
        out, final = jnp.zeros(v.shape, jnp.float32), states
        at = None if boundaries is None else jnp.repeat(states[:, None], boundaries.shape[1], axis=1)
    elif boundaries is None:
        # A grid's rows advance together: their heads are one axis of states.
        grouped = states if pack is not None else states.reshape(-1, *states.shape[2:])
        out, final = _chunked(form, inputs, grouped, pack)
        final = final.reshape(states.shape)
    else:
        out, final, at = _chunked_at(form, inputs, states, pack, boundaries)
    return out.reshape(v.shape).astype(v.dtype), final, at


def step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Backend "xla" of `kda_step`: both reads of the state in one product, so it is read twice and written once."""
    decay = jnp.exp(g)
    reads = product(jnp.stack([k * decay, q * decay], axis=-2), state)  # [B, H, 2, V]
    error = beta[..., None] * (v - reads[..., 0, :])
    out = reads[..., 1, :] + jnp.sum(q * k, axis=-1, keepdims=True) * error
    return out, decay[..., None] * state + k[..., None] * error[..., None, :]


# ---- reading and writing chunks -----------------------------------------------------------------------------------


def _row(pack: Pack, n: jax.Array | int, form: Form) -> Row:
    return Row(pack.first[n], pack.count[n], pack.start[n] % form.chunk)


def _num_groups(pack: Pack, form: Form) -> jax.Array:
    """Groups of chunks of each sequence, [N]; an empty sequence has none."""
    span = form.chunk * form.group
    lead = pack.start % form.chunk
    return jnp.where(pack.count > 0, (lead + pack.count + span - 1) // span, 0)


def _extent(row: Row, chunk: jax.Array, form: Form) -> tuple[jax.Array, jax.Array]:
    """Token counts of this call at which chunk number `chunk` begins and ends (equal when it is behind the end)."""
    begin = jnp.clip(chunk * form.chunk - row.lead, 0, row.count)
    return begin, jnp.clip((chunk + 1) * form.chunk - row.lead, 0, row.count)


def _load(inputs: Inputs, row: Row | None, group: jax.Array, form: Form) -> Inputs:
    """The inputs of one group of chunks, [group, B*H, L, ...]; rows of no token are zeros, which change nothing."""
    loaded = Inputs(*(_read(x, row, group, form) for x in inputs))
    return loaded._replace(g=jnp.maximum(loaded.g, MIN_LOG_DECAY))


def _read(x: jax.Array, row: Row | None, group: jax.Array, form: Form) -> jax.Array:
    # Batch and heads become one axis: XLA's CPU compiler of JAX 0.10.2 makes programs that crash from products with
    # an axis of size one among their batch axes.
    if row is None:
        block = _slice(x, group * (form.group * form.chunk), form.group * form.chunk)
        block = block.reshape(x.shape[0], form.group, form.chunk, *x.shape[2:])
        block = jnp.moveaxis(block, (1, 3), (0, 2))
        return block.reshape(form.group, x.shape[0] * x.shape[2], form.chunk, *x.shape[3:])
    chunks = []
    for p in range(form.group):
        begin, end = _extent(row, group * form.group + p, form)
        chunk = jnp.moveaxis(_slice(x, row.first + begin, form.chunk)[0], 1, 0)  # [H, L, ...]
        live = (jnp.arange(form.chunk) < end - begin).reshape(-1, *[1] * (x.ndim - 3))
        chunks.append(jnp.where(live, chunk, 0.0))
    return jnp.stack(chunks)


def _slice(x: jax.Array, at: jax.Array, length: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, at, length, axis=1)


def _store(whole: jax.Array, parts: jax.Array, row: Row | None, group: jax.Array, form: Form) -> jax.Array:
    """Writes a group's rows [group, B*H, L, ...] back; rows behind a chunk's end keep what stands there."""
    if row is None:
        block = parts.reshape(form.group, whole.shape[0], whole.shape[2], form.chunk, *parts.shape[3:])
        block = jnp.moveaxis(block, (0, 2), (1, 3))
        block = block.reshape(block.shape[0], form.group * form.chunk, *block.shape[3:])
        return jax.lax.dynamic_update_slice_in_dim(whole, block, group * (form.group * form.chunk), axis=1)
    for p in range(form.group):
        begin, end = _extent(row, group * form.group + p, form)
        at = row.first + begin
        block = jnp.moveaxis(parts[p], 0, 1)[None]
        live = (jnp.arange(form.chunk) < end - begin).reshape(-1, *[1] * (block.ndim - 2))
        block = jnp.where(live, block, _slice(whole, at, form.chunk))
        whole = jax.lax.dynamic_update_slice_in_dim(whole, block, at, axis=1)
    return whole


def _pad(inputs: Inputs, pack: Pack | None, form: Form) -> Inputs:
    """Room for the last chunk to be read whole."""
    tokens = inputs.q.shape[1]
    extra = form.chunk if pack is not None else -tokens % (form.chunk * form.group)
    return (
        Inputs(*(jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)) for x in inputs))
        if extra
        else inputs
    )


# ---- forward ------------------------------------------------------------------------------------------------------


def _advance(chunk: Chunk, inverse: jax.Array, v, beta, state) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs one chunk over the state it meets: out [.., L, V], u [.., L, V] and the next state."""
    length = v.shape[-2]
    reads = product(jnp.concatenate([chunk.kw, chunk.qe], axis=-2), state)
    u = product(inverse, beta[..., None] * (v - reads[..., :length, :]))
    out = reads[..., length:, :] + product(chunk.aqk, u)
    return out, u, _next_state(chunk, u, state)


def _next_state(chunk: Chunk, u: jax.Array, state: jax.Array) -> jax.Array:
    return chunk.decay[..., None] * state + product(jnp.swapaxes(chunk.ke, -1, -2), u)


def _run_group(form: Form, inputs: Inputs, row: Row | None, group, state, out):
    """Advances the state over one group; returns it with the output buffer, the inputs read and every u."""
    x = _load(inputs, row, group, form)
    chunk = chunk_matrices(x.q, x.k, x.g, form.bounded)
    inverse = unit_lower_inverse(x.beta[..., None] * chunk.akk)

    def advance(state, xs):
        out, u, state = _advance(*xs, state)
        return state, (out, u)

    state, (outs, us) = jax.lax.scan(advance, state, (chunk, inverse, x.v, x.beta))
    return state, _store(out, outs, row, group, form), x, us


def _over_sequences(pack: Pack, states: jax.Array, run, carry):
    """For each sequence n in turn: state, carry = run(n, states[n], carry)."""

    def one(n, both):
        finals, carry = both
        state, carry = run(n, jax.lax.dynamic_index_in_dim(states, n, keepdims=False), carry)
        return jax.lax.dynamic_update_slice_in_dim(finals, state[None], n, 0), carry

    if states.shape[0] == 1:
        return one(0, (states, carry))
    return jax.lax.fori_loop(0, states.shape[0], one, (states, carry))


def _forward(form: Form, inputs: Inputs, states: jax.Array, pack: Pack | None, boundaries: jax.Array | None):
    tokens = inputs.v.shape[1]
    padded = _pad(inputs, pack, form)
    out = jnp.zeros(padded.v.shape, jnp.float32)
    if pack is None:
        groups = padded.v.shape[1] // (form.chunk * form.group)

        def advance(i, carry):
            state, out = carry
            return _run_group(form, padded, None, i, state, out)[:2]

        final, out = jax.lax.fori_loop(0, groups, advance, (states, out))
        return out[:, :tokens], final, None

    groups = _num_groups(pack, form)
    if boundaries is None:

        def sequence(n, state, out):
            row = _row(pack, n, form)
            return jax.lax.fori_loop(
                0, groups[n], lambda i, c: _run_group(form, padded, row, i, *c)[:2], (state, out)
            )

        final, out = _over_sequences(pack, states, sequence, out)
        return out[:, :tokens], final, None

    order = jnp.argsort(boundaries, axis=1)
    sorted_at = jnp.minimum(jnp.take_along_axis(boundaries, order, axis=1), pack.count[:, None])
    at = jnp.repeat(states[:, None], boundaries.shape[1], axis=1)

    def sequence_at(n, state, carry):
        row = _row(pack, n, form)

        def advance(i, carry):
            state, out, at, seen = carry
            after, out, x, us = _run_group(form, padded, row, i, state, out)
            for p in range(form.group):
                begin, end = _extent(row, i * form.group + p, form)

                def due(c, end=end):
                    return (c[1] < sorted_at.shape[1]) & (
                        sorted_at[n, jnp.minimum(c[1], sorted_at.shape[1] - 1)] <= end
                    )

                def snapshot(c, p=p, begin=begin, state=state):
                    at, seen = c
                    here = _state_inside(form, x, us[p], p, sorted_at[n, seen] - begin, state)
                    return jax.lax.dynamic_update_slice(
                        at, here[None, None], (n, order[n, seen], 0, 0, 0)
                    ), seen + 1

                at, seen = jax.lax.while_loop(due, snapshot, (at, seen))
                if p + 1 < form.group:
                    raise NotImplementedError
            return after, out, at, seen

        state, out, at, _ = jax.lax.fori_loop(0, groups[n], advance, (state, *carry, jnp.int32(0)))
        return state, (out, at)

    final, (out, at) = _over_sequences(pack, states, sequence_at, (out, at))
    return out[:, :tokens], final, at


def _state_inside(
    form: Form, x: Inputs, u: jax.Array, p: int, rows: jax.Array, state: jax.Array
) -> jax.Array:
    """The state after the first `rows` tokens of a chunk: the same bits as a call that ends there."""
    live = (jnp.arange(form.chunk) < rows)[:, None]
    k, g, u = (jnp.where(live, y, 0.0) for y in (x.k[p], x.g[p], u))
    return _next_state(chunk_matrices(x.q[p], k, g, form.bounded), u, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_at(form: Form, inputs: Inputs, states: jax.Array, pack: Pack, boundaries: jax.Array):
    return _forward(form, inputs, states, pack, boundaries)


def _chunked_at_fwd(form, inputs, states, pack, boundaries):
    raise NotImplementedError(
        "kda_prefill: no gradients with boundaries; cut the call at the boundary instead"
    )


_chunked_at.defvjp(_chunked_at_fwd, lambda *_: None)


# ---- gradients ----------------------------------------------------------------------------------------------------

BACKWARD_GROUP = 4
"""Chunks between saved states: the backward pass keeps one state a group and makes the others again."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(form: Form, inputs: Inputs, states: jax.Array, pack: Pack | None):
    return _forward(form, inputs, states, pack, None)[:2]


def _chunked_fwd(form: Form, inputs: Inputs, states: jax.Array, pack: Pack | None):
    """As forward, also keeping the state that each group of the backward pass begins with, [groups, ...]."""
    form = form._replace(group=BACKWARD_GROUP)
    tokens = inputs.v.shape[1]
    padded = _pad(inputs, pack, form)
    out = jnp.zeros(padded.v.shape, jnp.float32)
    span = form.chunk * form.group

    def advance(row, base):
        def body(i, carry):
            state, out, kept = carry
            kept = jax.lax.dynamic_update_slice_in_dim(kept, state[None], base + i, axis=0)
            return *_run_group(form, padded, row, i, state, out)[:2], kept

        return body

    if pack is None:
        groups = padded.v.shape[1] // span
        kept = jnp.zeros((groups, *states.shape), jnp.float32)
        final, out, kept = jax.lax.fori_loop(0, groups, advance(None, 0), (states, out, kept))
    else:
        groups = _num_groups(pack, form)
        base = jnp.cumsum(groups) - groups
        most = tokens // span + 2 * states.shape[0]
        kept = jnp.zeros((most, *states.shape[1:]), jnp.float32)

        def sequence(n, state, carry):
            row = _row(pack, n, form)
            state, *carry = jax.lax.fori_loop(0, groups[n], advance(row, base[n]), (state, *carry))
            return state, tuple(carry)

        final, (out, kept) = _over_sequences(pack, states, sequence, (out, kept))
    return (out[:, :tokens], final), (inputs, kept, pack)


def _chunked_bwd(form: Form, residuals, cotangents):
    form = form._replace(group=BACKWARD_GROUP)
    inputs, kept, pack = residuals
    dout, dfinal = cotangents
    tokens = inputs.v.shape[1]
    padded = _pad(inputs, pack, form)
    dout = jnp.pad(dout, ((0, 0), (0, padded.v.shape[1] - tokens), (0, 0), (0, 0)))
    grads = jax.tree.map(jnp.zeros_like, padded)

    def retreat(row, base, groups):
        def body(j, carry):
            dstate, grads = carry
            i = groups - 1 - j
            state = jax.lax.dynamic_index_in_dim(kept, base + i, axis=0, keepdims=False)
            dstate, parts = _group_gradient(form, padded, dout, row, i, state, dstate)
            return dstate, Inputs(*(_store(a, b, row, i, form) for a, b in zip(grads, parts, strict=True)))

        return body

    if pack is None:
        groups = kept.shape[0]
        dstates, grads = jax.lax.fori_loop(0, groups, retreat(None, 0, groups), (dfinal, grads))
    else:
        groups = _num_groups(pack, form)
        base = jnp.cumsum(groups) - groups

        def sequence(n, dstate, grads):
            row = _row(pack, n, form)
            return jax.lax.fori_loop(0, groups[n], retreat(row, base[n], groups[n]), (dstate, grads))

        dstates, grads = _over_sequences(pack, dfinal, sequence, grads)
    grads = Inputs(*(x[:, :tokens] for x in grads))
    none = None if pack is None else jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), pack)
    return grads, dstates, none


def _group_gradient(form: Form, inputs: Inputs, dout, row, group, state, dstate):
    """Pulls the cotangents of a group's output and final state back to its inputs and first state."""
    x = _load(inputs, row, group, form)
    do = _read(dout, row, group, form)
    chunk, matrices_vjp = jax.vjp(lambda q, k, g: chunk_matrices(q, k, g, form.bounded), x.q, x.k, x.g)
    inverse = unit_lower_inverse(x.beta[..., None] * chunk.akk)
    length = form.chunk

    def advance(state, xs):
        chunk, inverse, v, beta = xs
        error = v - product(chunk.kw, state)
        u = product(inverse, beta[..., None] * error)
        return _next_state(chunk, u, state), (state, error, u)

    _, (before, error, u) = jax.lax.scan(advance, state, (chunk, inverse, x.v, x.beta))

    def retreat(dstate, xs):
        chunk, inverse, beta, do, from_out = xs
        du = from_out + product(chunk.ke, dstate)
        dwrite = product(jnp.swapaxes(inverse, -1, -2), du)  # of beta * error
        reads = jnp.swapaxes(jnp.concatenate([chunk.qe, -chunk.kw], axis=-2), -1, -2)
        dreads = jnp.concatenate([do, beta[..., None] * dwrite], axis=-2)
        return chunk.decay[..., None] * dstate + product(reads, dreads), (dstate, dwrite)

    from_out = product(jnp.swapaxes(chunk.aqk, -1, -2), do)
    dstate, (after, dwrite) = jax.lax.scan(
        retreat, dstate, (chunk, inverse, x.beta, do, from_out), reverse=True
    )
    dv = x.beta[..., None] * dwrite
    dreads = product_t(jnp.concatenate([do, -dv], axis=-2), before)
    da = -product_t(dwrite, u)
    dchunk = Chunk(
        kw=dreads[..., length:, :],
        qe=dreads[..., :length, :],
        ke=product_t(u, after),
        decay=jnp.sum(before * after, axis=-1),
        akk=_lower(x.beta[..., None] * da, -1),
        aqk=_lower(product_t(do, u), 0),
    )
    dq, dk, dg = matrices_vjp(dchunk)
    dbeta = jnp.sum(dwrite * error, axis=-1) + jnp.sum(da * chunk.akk, axis=-1)
    return dstate, Inputs(dq, dk, dv, dg, dbeta)


def _lower(x: jax.Array, diagonal: int) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool), diagonal), x, 0.0)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)
