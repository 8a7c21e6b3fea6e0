"""Latent attention in blocks with an online softmax, in plain JAX; no [T, S] matrix exists at any time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.buffers import zeros_after
from pallas_kernels.fixed_order import MIN_ROWS
from pallas_kernels.mla_attention.rows import Rows
from pallas_kernels.precision import accumulator, contract, rows_matmul, rows_matmul_t

KEY_BLOCK = 256
"""Latent rows a step, counted from row 0 of the sequence: part of what fixes a result's bits."""
ONE_TOKEN_KEY_BLOCK = 1024
"""The same for a single query: its products are short, and a step costs more than they do."""
QUERY_ROWS = 512
"""Most queries times heads a step."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
    q: jax.Array,
    latents: jax.Array,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    rank: int,
    scale: float,
) -> jax.Array:
    """See `mla_attention.reference.attend`; q, latents of any float dtype, the result float32 (or wider)."""
    return _forward(q, latents, page_table, start, lengths, rank, scale)[0]


def _block_of_queries(num_tokens: int, heads: int) -> tuple[int, int]:
    """Returns how many blocks of how many queries cover a call; a single token is not padded."""
    if num_tokens == 1:
        return 1, 1
    count = -(-num_tokens // max(1, QUERY_ROWS // heads))
    return count, max(-(-num_tokens // count), -(-MIN_ROWS // heads))


def _over_keys(step, carry, first, size, start, length, block=KEY_BLOCK):
    """Runs step(j, carry, masked) over the key blocks that queries first .. of a row look into, in order.

    The blocks that every query sees in full come first, unmasked: a mask is a pass over all scores. A query
    block without a valid query has no key blocks.
    """
    full = jnp.where(first < length, (start + first + 1) // block, 0)
    seen = jnp.where(first < length, start + jnp.minimum(first + size, length), 0)
    carry = jax.lax.fori_loop(0, full, functools.partial(step, masked=False), carry)
    blocks = (seen + block - 1) // block
    return jax.lax.fori_loop(full, blocks, functools.partial(step, masked=True), carry)


def _forward(q, latents, page_table, start, lengths, rank, scale):
    batch, num_tokens, heads, _ = q.shape
    rows, wide = Rows(latents, page_table), accumulator(q.dtype)
    count, size = _block_of_queries(num_tokens, heads)
    block = ONE_TOKEN_KEY_BLOCK if num_tokens == 1 else KEY_BLOCK
    q = _padded(q, count * size)
    query = jnp.arange(size, dtype=jnp.int32).repeat(heads)

    def attend_block(i: jax.Array, outputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        b, first = i // count, i % count * size
        queries = _read(q, b, first, size).astype(wide) * scale
        position = start[b] + first + query

        def attend_keys(j, carry, masked):
            top, total, mixed = carry
            keys = rows.read(b, j, block, start[b] + lengths[b] if masked else None).astype(wide)
            scores = _scores(queries, keys, position if masked else None, j)
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp(scores - new_top[:, None])
            fade = jnp.exp(top - new_top)
            total = total * fade + weights.sum(axis=1)
            mixed = mixed * fade[:, None] + rows_matmul(weights, keys[:, :rank])
            return new_top, total, mixed

        zeros = jnp.zeros((size * heads, rank), wide)
        empty = jnp.full_like(zeros[:, 0], -jnp.inf), zeros[:, 0], zeros
        top, total, mixed = _over_keys(attend_keys, empty, first, size, start[b], lengths[b], block)
        valid = first + query < lengths[b]
        out = jnp.where(valid[:, None], mixed / total[:, None], 0)
        # An infinite normaliser makes every weight of a padded query 0 in the backward pass.
        logsum = jnp.where(valid, top + jnp.log(total), jnp.inf)
        return _write(outputs[0], out, b, first), _write(outputs[1], logsum[:, None], b, first)

    outputs = tuple(zeros_after(q, (batch, count * size, heads, width), wide) for width in (rank, 1))
    out, logsum = jax.lax.fori_loop(0, batch * count, attend_block, outputs)
    return out[:, :num_tokens], logsum


def _scores(queries: jax.Array, keys: jax.Array, position: jax.Array | None, index: jax.Array) -> jax.Array:
    """Scores [rows, keys] of key block `index`; given the queries' positions, -inf where a key is behind one."""
    scores = rows_matmul_t(queries, keys)
    if position is None:
        return scores
    row = index * keys.shape[0] + jnp.arange(keys.shape[0], dtype=jnp.int32)
    return jnp.where(row <= position[:, None], scores, -jnp.inf)


def _padded(x: jax.Array, num_tokens: int) -> jax.Array:
    missing = num_tokens - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def _read(x: jax.Array, b: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Queries first .. of row b with their heads as rows: [B, T, H, C] -> [size*H, C]."""
    block = jax.lax.dynamic_slice(x, (b, first, 0, 0), (1, size, *x.shape[2:]))
    return block.reshape(-1, x.shape[3])


def _write(x: jax.Array, block: jax.Array, b: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(x, block.reshape(1, -1, *x.shape[2:]), (b, first, 0, 0))


def _attend_fwd(q, latents, page_table, start, lengths, rank, scale):
    out, logsum = _forward(q, latents, page_table, start, lengths, rank, scale)
    return out, (q, latents, page_table, start, lengths, out, logsum)


def _attend_bwd(rank, scale, residuals, d_out):
    q, latents, page_table, start, lengths, out, logsum = residuals
    batch, num_tokens, heads, channels = q.shape
    rows, wide = Rows(latents, page_table), accumulator(q.dtype)
    count, size = _block_of_queries(num_tokens, heads)
    query = jnp.arange(size, dtype=jnp.int32).repeat(heads)
    agreement = _padded((d_out * out).sum(axis=3, keepdims=True), count * size)
    padded_q, d_out = _padded(q, count * size), _padded(d_out, count * size)

    def pull_block(i, carry):
        d_q, d_rows = carry
        b, first = i // count, i % count * size
        queries = _read(padded_q, b, first, size).astype(wide) * scale
        d_mixed, minus, norm = (_read(x, b, first, size) for x in (d_out, agreement, logsum))
        position = start[b] + first + query

        def pull_keys(j, inner, masked):
            d_queries, d_rows = inner
            keys = rows.read(b, j, KEY_BLOCK, start[b] + lengths[b] if masked else None).astype(wide)
            weights = jnp.exp(_scores(queries, keys, position if masked else None, j) - norm)
            d_scores = weights * (contract("qr,kr->qk", d_mixed, keys[:, :rank]) - minus)
            d_queries = d_queries + contract("qk,kc->qc", d_scores, keys)
            d_keys = contract("qk,qc->kc", d_scores, queries)
            d_keys = d_keys.at[:, :rank].add(contract("qk,qr->kr", weights, d_mixed))
            at = (b, j * KEY_BLOCK, 0)
            old = jax.lax.dynamic_slice(d_rows, at, (1, *d_keys.shape))
            return d_queries, jax.lax.dynamic_update_slice(d_rows, old + d_keys, at)

        carry = jnp.zeros_like(queries), d_rows
        d_queries, d_rows = _over_keys(pull_keys, carry, first, size, start[b], lengths[b])
        return _write(d_q, d_queries * scale, b, first), d_rows

    d_q = zeros_after(d_out, padded_q.shape, wide)
    d_rows = zeros_after(d_out, (batch, -(-rows.capacity // KEY_BLOCK) * KEY_BLOCK, channels), wide)
    d_q, d_rows = jax.lax.fori_loop(0, batch * count, pull_block, (d_q, d_rows))
    return d_q[:, :num_tokens].astype(q.dtype), rows.scatter(d_rows).astype(latents.dtype), None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)
