"""Mixture of expert MLPs without work for experts that were not chosen, in plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.buffers import zeros_after
from pallas_kernels.expert_mlp.reference import Activation, Matrices
from pallas_kernels.expert_mlp.routing import Routing, route
from pallas_kernels.mxfp4 import Mxfp4, unpack_mxfp4
from pallas_kernels.precision import accumulator, contract, rows_matmul

TILE = 256
"""Rows a product. From 64 rows on, XLA's CPU products give a row the same bits for any number of rows, so which tile
a row falls into does not show in its result."""
LAST_TILES = (64, 96, 128, 160, TILE)
"""Sizes for what is left of an expert's rows: the smallest that holds them is used."""
BACKWARD_TILES = (TILE, 128)
FEW_TOKENS = 16
"""Up to this many tokens each chosen expert sees all of them: the cost is reading its matrices, not the product."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def mix(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate_up: Matrices,
    w_down: Matrices,
    activation: Activation,
) -> jax.Array:
    """See `expert_mlp.reference.mix`; x and the matrices in any float dtype, the matrices also packed. The result is in
    float32 (or wider)."""
    arguments = x.astype(accumulator(x.dtype)), expert_ids, expert_weights, w_gate_up, w_down, activation
    if x.shape[0] == 1:
        return _one_token(*arguments)
    return _few_tokens(*arguments) if x.shape[0] <= FEW_TOKENS else _many_tokens(*arguments)


def _expert(matrices: Matrices, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One expert's matrix, [in, out]."""
    if isinstance(matrices, Mxfp4):
        mine = (jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False) for leaf in matrices)
        return unpack_mxfp4(Mxfp4(*mine), dtype).T
    return jax.lax.dynamic_index_in_dim(matrices, index, keepdims=False).astype(dtype)


def _apply(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, activation: Activation) -> jax.Array:
    gate, up = jnp.split(rows_matmul(x, w_gate_up), 2, axis=1)
    return rows_matmul(activation(gate, up), w_down)


def _one_token(x, expert_ids, expert_weights, w_gate_up, w_down, activation):
    num_experts = w_down.shape[0]

    def slot(s, total):
        chosen = expert_ids[0, s]
        index = jnp.clip(chosen, 0, num_experts - 1)
        y = _apply(x, _expert(w_gate_up, index, x.dtype), _expert(w_down, index, x.dtype), activation)
        return total + jnp.where(chosen == index, expert_weights[0, s].astype(x.dtype) * y, 0)

    return jax.lax.fori_loop(0, expert_ids.shape[1], slot, jnp.zeros_like(x))


def _few_tokens(x, expert_ids, expert_weights, w_gate_up, w_down, activation):
    routing = route(expert_ids, w_down.shape[0])

    def expert(u, total):
        index = routing.used[u]
        y = _apply(x, _expert(w_gate_up, index, x.dtype), _expert(w_down, index, x.dtype), activation)
        chosen = expert_ids == index
        share = jnp.where(chosen, expert_weights.astype(x.dtype), 0).sum(axis=1, keepdims=True)
        return total + jnp.where(chosen.any(axis=1, keepdims=True), share * y, 0)

    return jax.lax.fori_loop(0, routing.num_used, expert, jnp.zeros_like(x))


def _many_tokens(x, expert_ids, expert_weights, w_gate_up, w_down, activation):
    routing = route(expert_ids, w_down.shape[0])
    token = _token_in_order(routing)

    def expert(u, out):
        index = routing.used[u]
        matrices = _expert(w_gate_up, index, x.dtype), _expert(w_down, index, x.dtype)

        def tile(at, size):
            return _apply(_rows(x, token, at, size), *matrices, activation)

        def whole_tile(i, out):
            at = routing.first[index] + i * TILE
            return jax.lax.dynamic_update_slice(out, tile(at, TILE), (at, 0))

        whole = routing.count[index] // TILE
        out = jax.lax.fori_loop(0, whole, whole_tile, out)
        at, left = routing.first[index] + whole * TILE, routing.count[index] % TILE
        last = [lambda size=size: jnp.pad(tile(at, size), ((0, TILE - size), (0, 0))) for size in LAST_TILES]
        choice = sum((left > size).astype(jnp.int32) for size in LAST_TILES)
        # What this writes behind the expert's own rows belongs to experts to come, and they overwrite it. With
        # nothing left to do, it is the smallest tile, wasted: cheaper than a branch that carries `out`.
        return jax.lax.dynamic_update_slice(out, jax.lax.switch(choice, last), (at, 0))

    out = zeros_after(x, (token.shape[0], x.shape[1]), x.dtype)
    out = jax.lax.fori_loop(0, routing.num_used, expert, out)
    return _weighted(out, expert_weights.astype(x.dtype), routing)


def _token_in_order(routing: Routing) -> jax.Array:
    """The token of every pair, by expert, with room behind for any tile to reach into."""
    return jnp.pad(routing.pair // routing.place.shape[1], (0, TILE))


def _rows(x: jax.Array, token: jax.Array, at: jax.Array, size: int) -> jax.Array:
    """The rows of x [N, C] for the pairs at .. at + size."""
    return x.at[jax.lax.dynamic_slice_in_dim(token, at, size)].get(mode="clip")


def _over_tiles(first, count, tile, carry):
    """Runs tile(at, size, carry) over `count` rows from `first`; only a tile of the smallest size is partial."""
    at, left = first, count
    for size in BACKWARD_TILES:
        tiles = (left + size - 1) // size if size == BACKWARD_TILES[-1] else left // size
        carry = jax.lax.fori_loop(
            0, tiles, lambda i, c, at=at, size=size: tile(at + i * size, size, c), carry
        )
        at, left = at + tiles * size, left - tiles * size
    return carry


def _weighted(rows: jax.Array, weights: jax.Array, routing: Routing) -> jax.Array:
    """Sums each token's rows, weighted, in the order of its slots: rows [>= N*S, D] -> [N, D]."""
    total = jnp.zeros((weights.shape[0], rows.shape[1]), rows.dtype)
    for s in range(weights.shape[1]):
        row = jnp.where(routing.taken[:, s, None], rows[routing.place[:, s]], 0)
        total = total + weights[:, s, None] * row
    return total


def _mix_fwd(x, expert_ids, expert_weights, w_gate_up, w_down, activation):
    if isinstance(w_gate_up, Mxfp4) or isinstance(w_down, Mxfp4):
        raise ValueError(
            "expert_mlp: no gradient goes through packed matrices; give unpack_mxfp4's result to train"
        )
    arguments = x, expert_ids, expert_weights, w_gate_up, w_down
    return mix(*arguments, activation), arguments


def _mix_bwd(activation, residuals, d_y):
    x, expert_ids, expert_weights, w_gate_up, w_down = residuals
    wide = accumulator(x.dtype)
    routing = route(expert_ids, w_down.shape[0])
    token, x_wide = _token_in_order(routing), x.astype(wide)
    share = jnp.pad(expert_weights.astype(wide).reshape(-1)[routing.pair], (0, TILE))[:, None]

    def expert(u, carry):
        d_x, d_share, d_gate_up, d_down = carry
        index = routing.used[u]
        gate_up, down = _expert(w_gate_up, index, wide), _expert(w_down, index, wide)
        end = routing.first[index] + routing.count[index]

        def tile(at, size, carry):
            d_x, d_share, d_gate_up, d_down = carry
            live = (at + jnp.arange(size, dtype=jnp.int32) < end)[:, None]
            inputs, d_out = (jnp.where(live, _rows(a, token, at, size), 0) for a in (x_wide, d_y))
            weight = jax.lax.dynamic_slice_in_dim(share, at, size)
            hidden, pull = jax.vjp(activation, *jnp.split(contract("nd,di->ni", inputs, gate_up), 2, axis=1))
            d_hidden = contract("nd,id->ni", d_out, down)
            d_inner = jnp.concatenate(pull(weight * d_hidden), axis=1)
            d_x = jax.lax.dynamic_update_slice(d_x, contract("ni,di->nd", d_inner, gate_up), (at, 0))
            d_weight = (hidden * d_hidden).sum(axis=1, keepdims=True)
            d_share = jax.lax.dynamic_update_slice(d_share, d_weight, (at, 0))
            d_gate_up = d_gate_up + contract("nd,ni->di", inputs, d_inner)
            d_down = d_down + contract("ni,nd->id", weight * hidden, d_out)
            return d_x, d_share, d_gate_up, d_down

        start = d_x, d_share, jnp.zeros_like(gate_up), jnp.zeros_like(down)
        d_x, d_share, mine_gate_up, mine_down = _over_tiles(
            routing.first[index], routing.count[index], tile, start
        )
        d_gate_up = jax.lax.dynamic_update_index_in_dim(
            d_gate_up, mine_gate_up.astype(d_gate_up.dtype), index, 0
        )
        d_down = jax.lax.dynamic_update_index_in_dim(d_down, mine_down.astype(d_down.dtype), index, 0)
        return d_x, d_share, d_gate_up, d_down

    d_x = zeros_after(d_y, (token.shape[0], x.shape[1]), wide)
    empty = d_x, jnp.zeros_like(share), jnp.zeros_like(w_gate_up), jnp.zeros_like(w_down)
    d_x, d_share, d_gate_up, d_down = jax.lax.fori_loop(0, routing.num_used, expert, empty)
    d_x = _weighted(d_x, jnp.ones(expert_ids.shape, wide), routing)
    d_weights = jnp.where(routing.taken, d_share[routing.place, 0], 0)
    return d_x.astype(x.dtype), None, d_weights.astype(expert_weights.dtype), d_gate_up, d_down


mix.defvjp(_mix_fwd, _mix_bwd)
