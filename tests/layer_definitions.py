"""KDA and MLA token by token in numpy float64, from a layer's parameters: what the layers must compute."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kda_jax.layers import KimiDeltaAttention, MultiHeadLatentAttention

Floats = NDArray[np.float64]


class KDAResult(NamedTuple):
    """y [T, D], the recurrent state [HV, K, V] and the window [W-1, C] behind the last token."""

    y: Floats
    recurrent: Floats
    window: Floats


def wide(x: object) -> Floats:
    """Anything array-like in float64."""
    return np.asarray(x).astype(np.float64)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def kda(layer: KimiDeltaAttention, x: Floats) -> KDAResult:
    """One row [T, D] from the beginning."""
    heads, keys, value_heads, values = layer.num_heads, layer.head_dim, layer.num_v_heads, layer.v_head_dim
    mixed, decay, gate, beta = np.split(
        x @ wide(layer.in_proj.kernel), np.cumsum(layer.in_proj.sizes)[:-1], axis=-1
    )
    taps = wide(layer.conv)
    window = np.concatenate([np.zeros((len(taps) - 1, mixed.shape[1])), mixed])
    mixed = np.sum([window[tap : tap + len(x)] * taps[tap] for tap in range(len(taps))], axis=0)
    mixed = mixed * sigmoid(mixed)
    q, k, v = np.split(mixed, [heads * keys, 2 * heads * keys], axis=-1)
    q, k = (
        np.repeat(part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6), value_heads // heads, axis=1)
        for part in (q.reshape(-1, heads, keys), k.reshape(-1, heads, keys))
    )
    v, q = v.reshape(-1, value_heads, values), q * keys**-0.5

    z = (decay @ wide(layer.f_b.kernel)).reshape(-1, value_heads, keys) + wide(layer.dt_bias)
    rate = np.exp(wide(layer.A_log))[:, None]
    bound = layer.gate_lower_bound
    g = -rate * np.logaddexp(0, z) if bound is None else bound * sigmoid(rate * z)
    state, outs = np.zeros((value_heads, keys, values)), []
    for t in range(len(x)):
        state = np.exp(g[t])[:, :, None] * state
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("h,hk,hv->hkv", sigmoid(beta[t]), k[t], error)
        outs.append(np.einsum("hkv,hk->hv", state, q[t]))
    if layer.g_b is not None:
        gate = gate @ wide(layer.g_b.kernel)
    out = rms_norm(np.stack(outs), wide(layer.o_norm), layer.norm_eps)
    out = out.reshape(len(x), -1) * sigmoid(gate)
    return KDAResult(out @ wide(layer.o_proj.kernel), state, window[len(x) :])


def mla(layer: MultiHeadLatentAttention, x: Floats) -> tuple[Floats, Floats]:
    """One row [T, D] from the beginning, with keys and values expanded: y and the latents [T, R+P]."""
    heads, rank, own, shared = layer.num_heads, layer.rank, layer.nope_dim, layer.rope_dim
    q, latent, shared_key, *gate = np.split(
        x @ wide(layer.in_proj.kernel), np.cumsum(layer.in_proj.sizes)[:-1], axis=-1
    )
    if layer.q_b is not None:
        q = rms_norm(q, wide(layer.q_norm), layer.latent_norm_eps) @ wide(layer.q_b.kernel)
    latent = rms_norm(latent, wide(layer.kv_norm), layer.latent_norm_eps)
    q = q.reshape(-1, heads, own + shared)
    key = np.einsum("tr,hnr->thn", latent, wide(layer.w_uk))
    value = np.einsum("tr,hrv->thv", latent, wide(layer.w_uv))
    scores = np.einsum("thn,shn->hts", q[..., :own], key)
    scores = (scores + np.einsum("thp,sp->hts", q[..., own:], shared_key)) * (own + shared) ** -0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("hts,shv->thv", weights, value).reshape(len(x), -1)
    if gate:
        out = out * sigmoid(gate[0])
    assert latent.shape[1] == rank
    return out @ wide(layer.o_proj.kernel), np.concatenate([latent, shared_key], axis=1)
