"""What the Pallas backends share: each brings a forward pass, and a backward pass or takes the backend "xla"'s."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import xla
from pallas_kernels.kda.reference import Pack

Results: TypeAlias = tuple[jax.Array, jax.Array, jax.Array | None]


class Sequence(NamedTuple):
    """What is differentiated: q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], states float32 [N, H, K, V]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    states: jax.Array


@runtime_checkable
class Forward(Protocol):
    """What a backend brings."""

    def __call__(
        self,
        x: Sequence,
        pack: Pack | None,
        boundaries: jax.Array | None,
        *,
        scale: float,
        chunk: int | None,
        interpret: bool,
    ) -> Results:
        """out [B, T, H, V] in v.dtype, final states [N, H, K, V], and with boundaries the states there [N, NB, ...].

        Args:
            x: the call's arrays; at least one token.
            pack: the sequences on the flat token axis; None for whole rows.
            boundaries: [N, NB] token counts of this call.
            scale: multiplies the output.
            chunk: tokens of a chunk; None lets the backend choose.
            interpret: run the kernels' bodies step by step, on any device.
        """
        ...


@runtime_checkable
class Backward(Protocol):
    """What a backend may bring beside it."""

    def __call__(
        self,
        x: Sequence,
        pack: Pack | None,
        d_out: jax.Array,
        d_finals: jax.Array,
        *,
        scale: float,
        chunk: int | None,
        interpret: bool,
    ) -> Sequence:
        """The gradients of the call's arrays, in their shapes and dtypes.

        Args:
            x, pack, scale, chunk, interpret: as `Forward` had them.
            d_out: the output's gradient, [B, T, H, V]; that of tokens of no sequence counts for nothing.
            d_finals: the final states', float32 [N, H, K, V].
        """
        ...


class Kernels(NamedTuple):
    """A backend; without a backward pass of its own it has the gradient of the backend "xla"."""

    forward: Forward
    backward: Backward | None = None


class Form(NamedTuple):
    """The static choices of a call."""

    kernels: Kernels
    scale: float
    gate_lower_bound: float | None
    chunk: int | None
    interpret: bool


def refusal(state: jax.Array) -> str | None:
    """Why no Pallas backend can do a call, or None."""
    return None if state.dtype == jnp.float32 else f"computes in float32, got a {state.dtype} state"


def prefill(
    kernels: Kernels,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    pack: Pack | None,
    boundaries: jax.Array | None,
    scale: float,
    gate_lower_bound: float | None,
    chunk_size: int | None,
) -> Results:
    """A backend of `kda_prefill` out of its kernels; `interpret` runs it step by step on any device."""
    form = Form(kernels, scale, gate_lower_bound, chunk_size, interpret)
    return _run(form, Sequence(q, k, v, g, beta, states), pack, boundaries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(form: Form, x: Sequence, pack: Pack | None, boundaries: jax.Array | None) -> Results:
    run = form.kernels.forward
    return run(x, pack, boundaries, scale=form.scale, chunk=form.chunk, interpret=form.interpret)


def _run_fwd(form: Form, x: Sequence, pack: Pack | None, boundaries: jax.Array | None):
    if boundaries is not None:
        raise NotImplementedError(
            "kda_prefill: no gradients with boundaries; cut the call at the boundary instead"
        )
    return _run(form, x, pack, None), (x, pack)


def _run_bwd(form: Form, residuals, cotangents):
    x, pack = residuals
    if form.kernels.backward is None:
        dx = _xla_gradient(form, x, pack, cotangents[:2])
    else:
        run = form.kernels.backward
        dx = run(x, pack, *cotangents[:2], scale=form.scale, chunk=form.chunk, interpret=form.interpret)
    none = None if pack is None else jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), pack)
    return dx, none, None


def _xla_gradient(form: Form, x: Sequence, pack: Pack | None, cotangents) -> Sequence:
    def forward(x: Sequence) -> tuple[jax.Array, jax.Array]:
        return xla.prefill(*x, pack, None, form.scale, form.gate_lower_bound, None)[:2]

    return jax.vjp(forward, x)[1](cotangents)[0]


_run.defvjp(_run_fwd, _run_bwd)
