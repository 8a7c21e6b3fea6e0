"""What the Pallas backends share: which calls they do, and gradients, which are those of the backend "xla"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.short_conv.xla import widened

Results: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]

MOST_TAPS = 8


class Form(NamedTuple):
    """The static choices of a call.

    Attributes:
        kernel: `padded` or `packed` of a backend: the arguments of `xla`'s, in any dtypes, and `interpret`.
        plain: `xla`'s of the same name.
        activation: "silu" or None.
        interpret: run the kernel's body step by step, on any device.
    """

    kernel: Callable[..., Results]
    plain: Callable[..., Results]
    activation: str | None
    interpret: bool


def refusal(x: jax.Array, weight: jax.Array, window: jax.Array) -> str | None:
    """Why no Pallas backend can do a call, or None."""
    if weight.shape[0] > MOST_TAPS:
        return f"takes up to {MOST_TAPS} taps, got W={weight.shape[0]}"
    wide = [y.dtype for y in (x, weight, window) if y.dtype not in (jnp.float32, jnp.bfloat16)]
    return f"takes float32 and bfloat16, got {wide[0]}" if wide else None


def convolve(
    kernel: Callable[..., Results],
    plain: Callable[..., Results],
    interpret: bool,
    x: jax.Array,
    weight: jax.Array,
    window: jax.Array,
    counts: jax.Array,
    boundaries: jax.Array,
    activation: str | None,
) -> Results:
    """A backend of `short_conv` out of its kernel."""
    return _run(Form(kernel, plain, activation, interpret), x, weight, window, counts, boundaries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    form: Form, x: jax.Array, weight: jax.Array, window: jax.Array, counts: jax.Array, boundaries: jax.Array
) -> Results:
    return form.kernel(x, weight, window, counts, boundaries, form.activation, interpret=form.interpret)


def _run_fwd(form: Form, *arrays: jax.Array):
    return _run(form, *arrays), arrays


def _run_bwd(form: Form, arrays: tuple[jax.Array, ...], cotangents: Results):
    *moving, counts, boundaries = arrays

    def plain(x: jax.Array, weight: jax.Array, window: jax.Array) -> Results:
        return widened(form.plain, x, weight, window, counts, boundaries, form.activation)

    none = (np.zeros(y.shape, jax.dtypes.float0) for y in (counts, boundaries))
    return *jax.vjp(plain, *moving)[1](cotangents), *none


_run.defvjp(_run_fwd, _run_bwd)
