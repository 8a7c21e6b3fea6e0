"""What the Pallas backends share: each brings a forward pass and takes the backend "xla"'s gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla_attention import xla

QUERIES = (jnp.float32, jnp.bfloat16, jnp.float16)
LATENTS = (*QUERIES, jnp.float8_e4m3fn)


@runtime_checkable
class Forward(Protocol):
    """What a backend brings."""

    def __call__(
        self,
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
        """As `reference.attend`, [B, T, H, R] in q's dtype; there is at least one query and one row.

        Args:
            interpret: run the kernels' bodies step by step, on any device.
        """
        ...


class Form(NamedTuple):
    """The static choices of a call."""

    forward: Forward
    rank: int
    scale: float
    interpret: bool


def refusal(q: jax.Array, latents: jax.Array) -> str | None:
    """Why no Pallas backend can do a call, or None."""
    if q.dtype not in QUERIES or latents.dtype not in LATENTS:
        return f"computes in float32 or bfloat16, got q in {q.dtype} and latents in {latents.dtype}"
    return None


def attend(
    forward: Forward,
    interpret: bool,
    q: jax.Array,
    latents: jax.Array,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    rank: int,
    scale: float,
) -> jax.Array:
    """A backend of `mla_attention` out of its forward pass."""
    return _run(Form(forward, rank, float(scale), interpret), q, latents, page_table, start, lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(form: Form, q, latents, page_table, start, lengths) -> jax.Array:
    return form.forward(
        q, latents, page_table, start, lengths, rank=form.rank, scale=form.scale, interpret=form.interpret
    )


def _run_fwd(form: Form, *arguments):
    return _run(form, *arguments), arguments


def _run_bwd(form: Form, arguments, cotangent):
    q, latents, *counts = arguments

    def forward(q: jax.Array, latents: jax.Array) -> jax.Array:
        out: Any = xla.attend(q, latents, *counts, form.rank, form.scale)
        return out.astype(q.dtype)

    none = (None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in counts)
    return *jax.vjp(forward, q, latents)[1](cotangent), *none


_run.defvjp(_run_fwd, _run_bwd)
