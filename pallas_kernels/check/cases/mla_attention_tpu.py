"""`mla_attention` on TPUs, as a caller jits it: many queries over a contiguous buffer, and one a row over pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.cases.case import Case, like
from pallas_kernels.check.cases.mla_attention import DTYPES
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.mla_attention.tpu import cost, make_plan
from pallas_kernels.shapes import Shape


def mla_attention_tpu(shape: Shape) -> Iterator[Case]:
    """The kernel for every kind of latents, named by their dtype."""
    for queries, latents in DTYPES:
        for kind in ("forward", "step"):
            yield _attend(shape, kind, jnp.dtype(queries), jnp.dtype(latents))


def _attend(shape: Shape, kind: str, queries: jnp.dtype, latents: jnp.dtype) -> Case:
    batch, tokens = (1, shape.tokens) if kind == "forward" else (shape.rows, 1)
    page, pages = (shape.tokens, 1) if kind == "forward" else (shape.page, shape.context // shape.page)
    channels, counts = shape.latents + shape.shared, like((batch,), jnp.int32)
    q = like((batch, tokens, shape.heads, channels), queries)
    pool = like((batch * pages, page, channels), latents)
    call = functools.partial(mla_attention, rank=shape.latents, implementation="tpu")

    def run(q: Any, pool: Any, start: Any, lengths: Any, *table: Any) -> Any:
        return call(q, pool, start=start, lengths=lengths, page_table=table[0] if table else None)

    table = (like((batch, pages), jnp.int32),) if kind == "step" else ()
    counted = cost(make_plan(q, pool, pages, shape.latents), batch, channels, queries, latents)
    name = "mla_attend, prefill" if kind == "forward" else "mla_attend, decode"
    arguments = (q, pool, counts, counts, *table)
    return Case(
        name, ("mla_attend",), 1, kind, shape.name, latents.name, run, arguments, counted, platform="tpu"
    )
