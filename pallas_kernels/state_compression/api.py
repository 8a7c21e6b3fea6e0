"""Public functions of the compressed state: checks, choice of backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend, choose
from pallas_kernels.state_compression import reference, tpu, triton
from pallas_kernels.state_compression.reference import CompressedState


def compress_state(state: jax.Array, *, implementation: str | None = None) -> CompressedState:
    """A KDA state in int8, with one scale a head and key channel: its largest magnitude by 127.

    The scale is rounded up to 17 significant bits, which makes a value times its scale exact. So every backend gives
    the same bits; what was decompressed compresses to the same bits again; and every number comes back within half a
    scale. Rows below 127 x 2^-100 (1e-28) come back as zeros. A row with NaN, an infinity or a magnitude above
    127 x 2^120 (1.7e38) comes back as NaN throughout: it never turns into numbers.

    Args:
        state: float32 [..., H, K, V].
        implementation: "reference" or "xla" (the same), "triton" or "tpu" (Pallas kernels for NVIDIA GPUs and for
            TPUs), "triton-interpret" or "tpu-interpret" (their bodies step by step, on any device), or None, which is
            "xla".

    Returns:
        values int8 [..., H, K, V] and scales float32 [..., H, K].

    Raises:
        ValueError: another shape or dtype; a backend's refusal with its reason; an unknown name.

    Source: SGLang's int8 checkpoints of linear-attention states have the same layout; the short scale is ours.
    """
    if state.ndim < 3 or state.dtype != jnp.float32:
        raise ValueError(
            f"compress_state: need a float32 state [..., H, K, V], got {state.dtype} {list(state.shape)}"
        )
    backends = _backends(reference.compress, triton.compress, tpu.compress, state.shape)
    run = choose("compress_state", implementation, backends)
    if state.size == 0:  # no backend need know of it
        return CompressedState(jnp.zeros(state.shape, jnp.int8), jnp.zeros(state.shape[:-1], jnp.float32))
    return run(state)


def decompress_state(compressed: CompressedState, *, implementation: str | None = None) -> jax.Array:
    """The state that `compress_state` made smaller: values times scales, without rounding.

    Args:
        compressed: values int8 [..., H, K, V] and scales float32 [..., H, K].
        implementation: as in `compress_state`.

    Returns:
        float32 [..., H, K, V].

    Raises:
        ValueError: shapes or dtypes do not fit; a backend's refusal with its reason; an unknown name.
    """
    values, scales = compressed
    if values.ndim < 3 or values.dtype != jnp.int8:
        raise ValueError(
            f"decompress_state: need int8 values [..., H, K, V], got {values.dtype} {list(values.shape)}"
        )
    if scales.shape != values.shape[:-1] or scales.dtype != jnp.float32:
        raise ValueError(
            f"decompress_state: need float32 scales {list(values.shape[:-1])} beside values {list(values.shape)}, "
            f"got {scales.dtype} {list(scales.shape)}"
        )
    backends = _backends(reference.decompress, triton.decompress, tpu.decompress, values.shape)
    run = choose("decompress_state", implementation, backends)
    return jnp.zeros(values.shape, jnp.float32) if values.size == 0 else run(compressed)


def _backends(
    definition: Callable[..., Any],
    on_gpu: Callable[..., Any],
    on_tpu: Callable[..., Any],
    shape: tuple[int, ...],
) -> dict[str, Backend]:
    backends = {"xla": Backend(definition), "reference": Backend(definition)}
    for name, run, refusal in (
        ("triton", on_gpu, triton.refusal(shape)),
        ("tpu", on_tpu, tpu.refusal(shape)),
    ):
        for suffix, interpret in (("", False), ("-interpret", True)):
            backends[name + suffix] = Backend(functools.partial(run, interpret=interpret), refusal)
    return backends
