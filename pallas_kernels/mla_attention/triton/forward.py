"""The two kernels as a backend: widths made whole, splits brought together."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.mla_attention.triton.attend import attend
from pallas_kernels.mla_attention.triton.combine import combine
from pallas_kernels.mla_attention.triton.plan import MOST_CHANNELS, make_plan


def forward(
    q: jax.Array,
    latents: jax.Array,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    *,
    rank: int,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """A `pallas.Forward`."""
    batch, tokens, heads, channels = q.shape
    if page_table is None:  # a contiguous buffer is one page a sequence
        page_table = jnp.arange(batch, dtype=jnp.int32)[:, None]
    plan = make_plan(q, latents, page_table.shape[1], rank, interpret=interpret)
    q, latents = (_widened(x, plan.channels - channels) for x in (q, latents))
    q, pool = q.reshape(batch, -1, plan.channels), latents.reshape(-1, plan.channels)
    means, norms = attend(q, pool, page_table, start, lengths, plan, scale)
    out = means[:, 0] if plan.splits == 1 else combine(means, norms, start, lengths, plan, q.dtype)
    return out.reshape(batch, tokens, heads, plan.rank)[..., :rank]


def _widened(x: jax.Array, more: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more),)) if more else x


def refusal(q: jax.Array, latents: jax.Array, rank: int, *, interpret: bool) -> str | None:
    """Why the kernels cannot do a call, or None."""
    if rank > MOST_CHANNELS:
        return f"holds values of {MOST_CHANNELS} channels at most, got {rank=}"
    if latents.dtype.itemsize > 1 or interpret:
        return None
    size = latents.shape[0] * latents.shape[1] * make_plan(q, latents, 1, rank).channels  # once made whole
    if 2**31 <= size <= 2**32:
        return (
            f"places in a pool of {size} one-byte numbers are counted in 32 bits, which end at 2^31; "
            "use a smaller or larger pool"
        )
    capability = _capability()
    if capability is not None and capability < (8, 9):
        return f"reads float8 on GPUs of compute capability 8.9 or higher, this one has {capability}"
    return None


def _capability() -> tuple[int, ...] | None:
    """The GPU's, or None where there is none (and kernels are only lowered)."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return None
    return tuple(int(part) for part in device.compute_capability.split("."))
