"""Public function of latent attention: checks, defaults, choice of backend."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend, choose
from pallas_kernels.counts import Counts, as_counts
from pallas_kernels.mla_attention import pallas, reference, tpu, triton, xla
from pallas_kernels.precision import accumulator


def mla_attention(
    q: jax.Array,
    latents: jax.Array,
    *,
    rank: int,
    start: Counts | None = None,
    lengths: Counts | None = None,
    page_table: Counts | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of all heads over one latent row a token, in absorbed form; one token or many.

    Query i of row b attends to the rows j <= start[b] + i; the values are the first `rank` channels of the
    rows. Rows [0, start + lengths) hold latents, this call's own included; what lies behind them is never
    looked at, not even NaN. Blocks of keys are counted from row 0 and gone through in order, so a query's
    bits depend neither on T (from 2 up) nor on the capacity nor on other rows of the batch; at T = 1 rounding
    differs.

    Args:
        q: [B, T, H, R+P] queries, already multiplied by the key up-projection.
        latents: [B, S, R+P], or with `page_table` a pool [num_pages, page_size, R+P]. In any float dtype, also
            float8_e4m3fn, taken as the numbers they are: where they stand for `s` times as much, give `scale`
            times s and multiply the output by s.
        rank: R, the width of the values.
        start: [B] int32 rows written before this call; zeros when None.
        lengths: [B] int32 valid queries a row (the rest is padding and gives 0); all T when None.
        page_table: [B, n] int32: row j of sequence b is row j % page_size of page
            page_table[b, j // page_size]. Entries behind the last written row must be pages of the pool, any.
        scale: multiplies the scores. The default, (R+P)^-0.5, is that of the absorbed width, hardly ever a
            model's.
        implementation: "reference", "xla", "triton" or "tpu" (Pallas kernels for NVIDIA GPUs and for TPUs, whose
            gradients are those of "xla"; they multiply bfloat16 q and latents of two bytes or fewer as bfloat16,
            and round the weights to it), "triton-interpret" or "tpu-interpret" (their bodies step by step, on any
            device), or None, which is "xla".

    Returns:
        [B, T, H, R] in q's dtype; scores, softmax and sums are float32 (or wider).

    Raises:
        ValueError: shapes, rank or counts do not fit, an unknown name, or a backend's refusal with its reason.

    Source:
        DeepSeek-V2, arXiv:2405.04434, section 2.1.2; online softmax of arXiv:1805.02867.
    """
    if q.ndim != 4 or latents.ndim != 3 or q.shape[3] != latents.shape[2]:
        raise ValueError(
            f"mla_attention: q [B,T,H,R+P] and latents [B,S,R+P] do not fit: {q.shape}, {latents.shape}"
        )
    batch, num_tokens, _, channels = q.shape
    if not 0 < rank <= channels:
        raise ValueError(f"mla_attention: {rank=} must lie in 1..{channels}, the width of q and latents")
    if page_table is not None:
        page_table = as_counts(
            "mla_attention: page_table", page_table, (batch, -1), limit=latents.shape[0] - 1
        )
    elif latents.shape[0] != batch:
        raise ValueError(
            f"mla_attention: q has {batch} rows, latents {latents.shape[0]}; a pool needs a page_table"
        )
    capacity = latents.shape[1] * (1 if page_table is None else page_table.shape[1])
    begun = [0] * batch if start is None else start
    begun = as_counts("mla_attention: start", begun, (batch,), limit=capacity)
    valid = [num_tokens] * batch if lengths is None else lengths
    valid = as_counts("mla_attention: lengths", valid, (batch,), limit=num_tokens)
    as_counts("mla_attention: start + lengths (rows written)", begun + valid, (batch,), limit=capacity)

    backends = {
        "xla": Backend(xla.attend),
        **_pallas_backends(q, latents, page_table, rank),
        "reference": Backend(_reference),
    }
    run = choose("mla_attention", implementation, backends)
    if q.size == 0 or latents.size == 0:  # no backend need know of calls without a query or a row
        return jnp.zeros((*q.shape[:3], rank), q.dtype)
    scale = channels**-0.5 if scale is None else scale
    return run(q, latents, page_table, begun, valid, rank, scale).astype(q.dtype)


def _pallas_backends(
    q: jax.Array, latents: jax.Array, page_table: jax.Array | None, rank: int
) -> dict[str, Backend]:
    """The kernels' backends, each also step by step on any device."""
    backends = {}
    for suffix, interpret in (("", False), ("-interpret", True)):
        refusals = {
            "triton": triton.refusal(q, latents, rank, interpret=interpret),
            "tpu": tpu.refusal(latents, page_table),
        }
        for name, forward in (("triton", triton.forward), ("tpu", tpu.forward)):
            run = functools.partial(pallas.attend, forward, interpret)
            backends[name + suffix] = Backend(run, pallas.refusal(q, latents) or refusals[name])
    return backends


def _reference(q, latents, *others):
    wide = accumulator(q.dtype)
    return reference.attend(q.astype(wide), latents.astype(wide), *others)
