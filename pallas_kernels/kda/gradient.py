"""The gradient of a call without boundaries. It keeps one state of every few chunks and makes the others again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.buffers import zeros_after
from pallas_kernels.kda.chunk import (
    Chunk,
    apart,
    both,
    chunk_matrices,
    columns_product,
    product,
    product_t,
    unit_lower_inverse,
)
from pallas_kernels.kda.chunk_gradient import chunk_gradient
from pallas_kernels.kda.forward import forward, forward_at, next_state, over_sequences, run_group
from pallas_kernels.kda.grid import Form, Inputs, load, num_groups, pad, read, room, row_of, store
from pallas_kernels.kda.reference import Pack

BACKWARD_GROUP = 4
"""Chunks between saved states: the backward pass keeps one state a group and makes the others again."""


chunked = jax.custom_vjp(forward, nondiff_argnums=(0,))
"""`forward`, with a gradient."""


def _chunked_fwd(form: Form, inputs: Inputs, states: jax.Array, pack: Pack | None):
    """As forward, also keeping the state that each group of the backward pass begins with, [groups, ...]."""
    form = form._replace(group=BACKWARD_GROUP)
    tokens = inputs.v.shape[1]
    padded = Inputs(*(pad(x, pack, form) for x in inputs))
    out = zeros_after(inputs.v, room(inputs.v, pack, form), jnp.float32)
    span = form.chunk * form.group

    def advance(row, base):
        def body(i, carry):
            state, out, kept = carry
            kept = jax.lax.dynamic_update_slice_in_dim(kept, state[None], base + i, axis=0)
            return *run_group(form, padded, row, i, state, out), kept

        return body

    if pack is None:
        groups = padded.v.shape[1] // span
        kept = zeros_after(inputs.v, (groups, *states.shape), jnp.float32)
        final, out, kept = jax.lax.fori_loop(0, groups, advance(None, 0), (states, out, kept))
    else:
        groups = num_groups(pack, form)
        base = jnp.cumsum(groups) - groups
        most = tokens // span + 2 * states.shape[0]
        kept = zeros_after(inputs.v, (most, *states.shape[1:]), jnp.float32)

        def sequence(n, state, carry):
            row = row_of(pack, n, form)
            state, *carry = jax.lax.fori_loop(0, groups[n], advance(row, base[n]), (state, *carry))
            return state, tuple(carry)

        final, (out, kept) = over_sequences(pack, states, sequence, (out, kept))
    return (out[:, :tokens], final), (inputs, kept, pack)


def _chunked_bwd(form: Form, residuals, cotangents):
    form = form._replace(group=BACKWARD_GROUP)
    inputs, kept, pack = residuals
    dout, dfinal = cotangents
    tokens = inputs.v.shape[1]
    padded = Inputs(*(pad(x, pack, form) for x in inputs))
    grads = Inputs(*(zeros_after(dout, room(x, pack, form), x.dtype) for x in inputs))
    dout = pad(dout, pack, form)

    def retreat(row, base, groups):
        def body(j, carry):
            dstate, grads = carry
            i = groups - 1 - j
            state = jax.lax.dynamic_index_in_dim(kept, base + i, axis=0, keepdims=False)
            dstate, parts = _group_gradient(form, padded, dout, row, i, state, dstate)
            return dstate, Inputs(*(store(a, b, row, i, form) for a, b in zip(grads, parts, strict=True)))

        return body

    if pack is None:
        groups = kept.shape[0]
        dstates, grads = jax.lax.fori_loop(0, groups, retreat(None, 0, groups), (dfinal, grads))
    else:
        groups = num_groups(pack, form)
        base = jnp.cumsum(groups) - groups

        def sequence(n, dstate, grads):
            row = row_of(pack, n, form)
            return jax.lax.fori_loop(0, groups[n], retreat(row, base[n], groups[n]), (dstate, grads))

        dstates, grads = over_sequences(pack, dfinal, sequence, grads)
    grads = Inputs(*(x[:, :tokens] for x in grads))
    none = None if pack is None else jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), pack)
    return grads, dstates, none


def _group_gradient(form: Form, inputs: Inputs, dout, row, group, state, dstate):
    """Pulls the cotangents of a group's output and final state back to its inputs and first state."""
    x = load(inputs, row, group, form)
    do = read(dout, row, group, form) * form.scale
    chunk, levels = chunk_matrices(x.q, x.k, x.g, form.bounded)
    inverse = unit_lower_inverse(x.beta[..., None] * chunk.pairs[..., 0, :, :])

    def advance(state, xs):
        chunk, inverse, v, beta = xs
        error = v - product(chunk.reads[..., 0, :, :], state)
        u = product(inverse, beta[..., None] * error)
        return next_state(chunk, u, state), (state, error, u)

    _, (before, error, u) = jax.lax.scan(advance, state, (chunk, inverse, x.v, x.beta))

    def retreat(dstate, xs):
        chunk, inverse, beta, do, from_out = xs
        du = from_out + product(chunk.ke, dstate)
        dwrite = columns_product(inverse, du)  # of beta * error
        dreads = jnp.concatenate([-beta[..., None] * dwrite, do], axis=-2)
        back = columns_product(both(chunk.reads), dreads)
        return chunk.decay[..., None] * dstate + back, (dstate, dwrite)

    from_out = columns_product(chunk.pairs[..., 1, :, :], do)
    dstate, (after, dwrite) = jax.lax.scan(
        retreat, dstate, (chunk, inverse, x.beta, do, from_out), reverse=True
    )
    dv = x.beta[..., None] * dwrite
    dpairs = apart(product_t(jnp.concatenate([-dwrite, do], axis=-2), u))
    dpairs_write, dpairs_out = dpairs[..., 0, :, :], dpairs[..., 1, :, :]
    dchunk = Chunk(
        reads=apart(product_t(jnp.concatenate([-dv, do], axis=-2), before)),
        ke=product_t(u, after),
        decay=jnp.sum(before * after, axis=-1),
        pairs=jnp.stack([_lower(x.beta[..., None] * dpairs_write, -1), _lower(dpairs_out, 0)], axis=-3),
    )
    dq, dk, dg = chunk_gradient(x.q, x.k, x.g, levels, dchunk, form.bounded)
    dbeta = jnp.sum(dwrite * error, axis=-1) + jnp.sum(dpairs_write * chunk.pairs[..., 0, :, :], axis=-1)
    return dstate, Inputs(dq, dk, dv, dg, dbeta)


def _lower(x: jax.Array, diagonal: int) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool), diagonal), x, 0.0)


chunked.defvjp(_chunked_fwd, _chunked_bwd)


chunked_at = jax.custom_vjp(forward_at, nondiff_argnums=(0,))
"""`forward_at`, which refuses to be differentiated."""


def _chunked_at_fwd(form: Form, inputs: Inputs, states: jax.Array, pack: Pack | None, boundaries: jax.Array):
    raise NotImplementedError(
        "kda_prefill: no gradients with boundaries; cut the call at the boundary instead"
    )


def _chunked_at_bwd(form: Form, residuals: None, cotangents: tuple[jax.Array, ...]) -> tuple[None, ...]:
    return (None,) * 4


chunked_at.defvjp(_chunked_at_fwd, _chunked_at_bwd)
