"""What the Pallas backends share: each brings a forward pass, and a backward pass or takes the backend "xla"'s."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import xla
from pallas_kernels.kda.gate import Gate
from pallas_kernels.kda.prelude import Prelude, prepare
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
class Fused(Protocol):
    """A `Forward` that does the prelude itself."""

    def __call__(
        self,
        x: Sequence,
        prelude: Prelude,
        pack: Pack | None,
        boundaries: jax.Array | None,
        *,
        scale: float,
        chunk: int | None,
        interpret: bool,
    ) -> Results:
        """As `Forward`, of q and k [B, T, HV / r, K] for any r, and of g as the prelude says."""
        ...


@runtime_checkable
class Backward(Protocol):
    """What a backend may bring beside it. It is handed what `prepare` made, whatever the forward pass does itself."""

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
    """A backend.

    Attributes:
        forward: of what is ready.
        backward: None takes the gradient of the backend "xla".
        fused: runs in the place of `forward`, when there is one.
    """

    forward: Forward
    backward: Backward | None = None
    fused: Fused | None = None


class Form(NamedTuple):
    """The static choices of a call."""

    kernels: Kernels
    qk_l2norm: bool
    lower_bound: float | None  # of the gate
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
    prelude: Prelude,
    pack: Pack | None,
    boundaries: jax.Array | None,
    scale: float,
    gate_lower_bound: float | None,
    chunk_size: int | None,
) -> Results:
    """A backend of `kda_prefill` out of its kernels; `interpret` runs it step by step on any device."""
    gate = prelude.gate
    bound = None if gate is None else gate.lower_bound
    form = Form(kernels, prelude.qk_l2norm, bound, scale, gate_lower_bound, chunk_size, interpret)
    arrays = None if gate is None else gate._replace(lower_bound=None)
    return _run(form, Sequence(q, k, v, g, beta, states), arrays, pack, boundaries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    form: Form, x: Sequence, gate: Gate | None, pack: Pack | None, boundaries: jax.Array | None
) -> Results:
    prelude, options = _prelude(form, gate), _options(form)
    if form.kernels.fused is not None:
        return form.kernels.fused(x, prelude, pack, boundaries, **options)
    q, k, g = prepare(prelude, x.q, x.k, x.g)
    return form.kernels.forward(x._replace(q=q, k=k, g=g), pack, boundaries, **options)


def _prelude(form: Form, gate: Gate | None) -> Prelude:
    return Prelude(form.qk_l2norm, None if gate is None else gate._replace(lower_bound=form.lower_bound))


def _options(form: Form) -> dict[str, Any]:
    return {"scale": form.scale, "chunk": form.chunk, "interpret": form.interpret}


def _run_fwd(form: Form, x: Sequence, gate: Gate | None, pack: Pack | None, boundaries: jax.Array | None):
    if boundaries is not None:
        raise NotImplementedError(
            "kda_prefill: no gradients with boundaries; cut the call at the boundary instead"
        )
    return _run(form, x, gate, pack, None), (x, gate, pack)


def _run_bwd(form: Form, residuals, cotangents):
    x, gate, pack = residuals
    (q, k, g), pull_back = jax.vjp(
        lambda q, k, g, gate: prepare(_prelude(form, gate), q, k, g), x.q, x.k, x.g, gate
    )
    x = x._replace(q=q, k=k, g=g)
    if form.kernels.backward is None:
        dx = _xla_gradient(form, x, pack, cotangents[:2])
    else:
        dx = form.kernels.backward(x, pack, *cotangents[:2], **_options(form))
    dq, dk, dg, dgate = pull_back((dx.q, dx.k, dx.g))
    none = None if pack is None else jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), pack)
    return dx._replace(q=dq, k=dk, g=dg), dgate, none, None


def _xla_gradient(form: Form, x: Sequence, pack: Pack | None, cotangents) -> Sequence:
    def forward(x: Sequence) -> tuple[jax.Array, jax.Array]:
        return xla.prefill(*x, pack, None, form.scale, form.gate_lower_bound, None)[:2]

    return jax.vjp(forward, x)[1](cotangents)[0]


_run.defvjp(_run_fwd, _run_bwd)
