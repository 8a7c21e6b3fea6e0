"""The definition of latent attention: a softmax over all written rows, in one piece."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.precision import contract


def attend(
    q: jax.Array,
    latents: jax.Array,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    rank: int,
    scale: float,
) -> jax.Array:
    """out[b,i,h] = sum_j softmax_j(scale q[b,i,h] . latents[b,j]) latents[b,j,:rank] over j <= start[b] + i.

    Args:
        q: [B, T, H, R+P] in the dtype to compute in.
        latents: [B, S, R+P], or the pool [pages, page_size, R+P]; same dtype.
        page_table: [B, n] int32, or None.
        start: [B] int32, rows written before this call.
        lengths: [B] int32, queries that count; the others give 0.
        rank: R.
        scale: multiplies the scores.

    Returns:
        [B, T, H, R].
    """
    if page_table is not None:
        latents = latents[page_table].reshape(page_table.shape[0], -1, latents.shape[-1])
    row = jnp.arange(latents.shape[1], dtype=jnp.int32)
    query = jnp.arange(q.shape[1], dtype=jnp.int32)
    written = row < (start + lengths)[:, None]  # [B, S]
    latents = jnp.where(written[..., None], latents, 0)
    seen = row <= (start[:, None] + query)[..., None]  # [B, T, S]
    scores = jnp.where(seen[:, :, None], contract("bthd,bsd->bths", q, latents) * scale, -jnp.inf)
    out = contract("bths,bsr->bthr", jax.nn.softmax(scores, axis=-1), latents[..., :rank])
    return jnp.where((query < lengths[:, None])[..., None, None], out, 0)
