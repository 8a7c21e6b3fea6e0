"""`kda_decode` and `kda_draft` on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.check.cases.case import Case, like
from pallas_kernels.kda_decode.inputs import Form, KDAParameters, Tokens
from pallas_kernels.kda_decode.triton import decode, draft
from pallas_kernels.kda_decode.triton.cost import decode_cost
from pallas_kernels.shapes import Shape

DRAFTS = 4


def kda_decode(shape: Shape) -> Iterator[Case]:
    """One token and `DRAFTS` of them in both dtypes, over a pool four times the batch, with the unbounded gate."""
    for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        yield _case(shape, dtype, "kda_decode", 1)
        yield _case(shape, dtype, "kda_draft", DRAFTS)


def _case(shape: Shape, dtype: jnp.dtype, kernel: str, tokens: int) -> Case:
    size, channels = 4 * shape.rows, shape.heads * (2 * shape.keys + shape.values)
    layer = KDAParameters(
        like((shape.window, channels), dtype),
        like((shape.heads,)),
        like((shape.heads, shape.keys)),
        like((shape.values,), dtype),
    )
    pools = (
        like((size, shape.heads, shape.keys, shape.values)),
        like((size, shape.window - 1, channels), dtype),
    )
    form = Form(shape.heads, shape.keys**-0.5, None, 1e-5)
    drafts = _tokens(shape, dtype, (shape.rows, tokens))
    keep = kernel == "kda_draft"
    x, run = (drafts, draft) if keep else (_tokens(shape, dtype, (shape.rows,)), decode)
    return Case(
        kernel,
        (kernel,),
        1,
        "step",
        shape.name,
        dtype.name,
        functools.partial(run, form=form, interpret=False),
        (x, layer, *pools, like((shape.rows,), jnp.int32)),
        decode_cost(drafts, layer, *pools, keep=keep),
    )


def _tokens(shape: Shape, dtype: jnp.dtype, lead: tuple[int, ...]) -> Tokens:
    return Tokens(
        like((*lead, shape.heads * (2 * shape.keys + shape.values)), dtype),
        like((*lead, shape.heads, shape.keys), dtype),
        like((*lead, shape.heads), dtype),
        like((*lead, shape.heads, shape.values), dtype),
    )
