"""What a caller of the public operators hands in: checked, and brought into one form."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.counts import Counts, as_counts, as_cu_seqlens
from pallas_kernels.kda.gate import Gate, check_gate
from pallas_kernels.kda.reference import Pack


def ready_gate(g: jax.Array, gate: Gate | None) -> Gate | None:
    """The gate's arrays as JAX's, or says what is wrong with them."""
    if gate is None:
        return None
    bias = None if gate.dt_bias is None else jnp.asarray(gate.dt_bias)
    gate = Gate(jnp.asarray(gate.A_log), bias, gate.lower_bound)
    check_gate(g, gate)
    return gate


def check_sequence(q, k, v, g, beta, *, gated: bool) -> tuple[int, int, int, int]:
    """Returns B, T, HV and V, or says which shape is wrong."""
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q and k must be [B, T, H, K] and alike, got {q.shape} and {k.shape}")
    if v.ndim != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must be [B, T, HV, V] with B, T = {q.shape[:2]}, got {v.shape}")
    batch, tokens, heads, channels = q.shape
    value_heads = v.shape[2]
    if heads == 0 or value_heads % heads:
        raise ValueError(f"value heads must be a multiple of query heads, got HV={value_heads}, H={heads}")
    if g.shape != (batch, tokens, value_heads, channels):
        raise ValueError(f"g must be [B, T, HV, K] = {(batch, tokens, value_heads, channels)}, got {g.shape}")
    if beta.shape != (batch, tokens, value_heads):
        raise ValueError(f"beta must be [B, T, HV] = {(batch, tokens, value_heads)}, got {beta.shape}")
    if not gated and g.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"g is a log decay in float32, got {g.dtype}; compute the gate in float32 (kda_gate does)"
        )
    return batch, tokens, value_heads, v.shape[3]


def make_pack(
    batch: int, tokens: int, cu_seqlens: Counts | None, start: Counts | None, lengths: Counts | None
) -> Pack | None:
    """Lays sequences on the flat token axis [B * T]; None when rows are whole and start on the chunk grid."""
    if cu_seqlens is not None:
        if batch != 1 or lengths is not None:
            raise ValueError(
                f"cu_seqlens packs sequences in a batch of one without lengths, got B={batch}, {lengths=}"
            )
        cu = as_cu_seqlens("cu_seqlens", cu_seqlens, tokens)
        first, count = cu[:-1], cu[1:] - cu[:-1]
    elif start is None and lengths is None:
        return None
    else:
        first = jnp.arange(batch, dtype=jnp.int32) * tokens
        count = jnp.full((batch,), tokens, jnp.int32)
        if lengths is not None:
            count = jnp.clip(as_counts("lengths", lengths, (batch,)), 0, tokens)
    begun = jnp.zeros_like(first) if start is None else as_counts("start", start, first.shape)
    return Pack(first, count, begun)
