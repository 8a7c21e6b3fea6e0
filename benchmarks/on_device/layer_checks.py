"""Checks of what stands around the recurrence in a layer, and of latent attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.on_device.judge import Check
from pallas_kernels import (
    CompressedState,
    KDAParameters,
    compress_state,
    decompress_state,
    kda_decode,
    kda_draft,
    mla_attention,
    short_conv,
)

EPS = 1e-5


def layer_checks(*, little: bool, dtype: jnp.dtype, bound: float) -> Iterator[Check]:
    """The decode step and drafts, the convolution, latent attention, state compression; `bound` is a dtype's."""
    size = 32 if little else 128
    yield from _decodes(size, dtype, bound)
    yield from _convolutions(100 if little else 5000, dtype, bound)
    yield from _attentions(*((32, 16, 100) if little else (512, 64, 3000)), dtype, bound)
    if dtype == jnp.float32:  # what a state always is
        state = np.random.default_rng(0).standard_normal((3, 2, size, size), np.float32)
        state[0, 0, 1], state[1, 1, 2, 3] = 0.0, np.nan
        yield Check("compress_state, decompress_state", _compress, (state,), 1e-6)


def _decodes(size: int, dtype: jnp.dtype, bound: float) -> Iterator[Check]:
    slots = np.array([7, -1, 0, 3, 8], np.int32)
    for function, lead in ((kda_decode, (5,)), (kda_draft, (5, 3))):
        for heads in (4, 2):
            channels = 2 * heads * size + 4 * size
            normal = np.random.default_rng(heads).standard_normal
            tokens = (channels,), (4, size), (4,), (4, size)
            arrays = [normal((*lead, *shape)).astype(dtype) for shape in tokens]
            layer = normal((4, channels)), normal((4,)), normal((4, size)), 1 + 0.1 * normal((size,))
            arrays += [
                layer[0].astype(dtype), *(x.astype(np.float32) for x in layer[1:3]), layer[3].astype(dtype)
            ]  # fmt: skip
            pools = 0.1 * normal((9, 4, size, size)), normal((9, 3, channels))
            arrays += [pools[0].astype(np.float32), pools[1].astype(dtype), slots]
            name = f"{function.__name__}, slots" + ("" if heads == 4 else ", shared heads")
            yield Check(name, functools.partial(_token, function), tuple(arrays), bound)


def _token(function: Callable[..., Any], *x: Any, implementation: str) -> Any:
    mixed, decay, beta, gate, conv, A_log, bias, norm, states, windows, slots = x
    layer = KDAParameters(conv, A_log, bias, norm)
    return function(
        mixed, decay, beta, gate, layer, states, windows, eps=EPS, slots=slots, implementation=implementation
    )


def _convolutions(tokens: int, dtype: jnp.dtype, bound: float) -> Iterator[Check]:
    normal = np.random.default_rng(2).standard_normal
    arrays = normal((1, tokens, 200)), normal((4, 200)), normal((4, 3, 200))
    cuts = np.array([0, 1, 1, tokens // 2, tokens - 3], np.int32)
    at = np.array([[1], [0], [2], [tokens // 4]], np.int32)
    yield Check("short_conv, packed", _convolve, (*(x.astype(dtype) for x in arrays), cuts, at), bound)


def _convolve(x: Any, weight: Any, window: Any, cuts: Any, at: Any, *, implementation: str) -> Any:
    return short_conv(x, weight, window, cu_seqlens=cuts, boundaries=at, implementation=implementation)


def _attentions(rank: int, shared: int, context: int, dtype: jnp.dtype, bound: float) -> Iterator[Check]:
    normal = np.random.default_rng(3).standard_normal
    pages = -(-(context + 80) // 64)
    table = np.random.default_rng(4).permutation(2 * pages).astype(np.int32).reshape(2, pages)
    pool = normal((2 * pages, 64, rank + shared)).astype(dtype)
    for name, tokens in (("mla_attention, resumed", 70), ("mla_attention, decode", 1)):
        q = (normal((2, tokens, 12, rank + shared)) / 4).astype(dtype)
        begun = np.array([context, 17], np.int32)
        yield Check(name, functools.partial(_attend, rank), (q, pool, table, begun), bound)


def _attend(rank: int, q: Any, pool: Any, table: Any, begun: Any, *, implementation: str) -> jax.Array:
    return mla_attention(
        q, pool, rank=rank, start=begun, page_table=table, scale=0.2, implementation=implementation
    )


def _compress(state: Any, *, implementation: str) -> Any:
    """What comes back, and the values; where a row is lost, so it is in both."""
    made: CompressedState = compress_state(state.astype(jnp.float32), implementation=implementation)
    back = decompress_state(made, implementation=implementation)
    return jnp.nan_to_num(back, nan=3.0), made.values.astype(jnp.float32)
