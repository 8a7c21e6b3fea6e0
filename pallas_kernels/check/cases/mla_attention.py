"""`mla_attention` on GPUs: many queries over a contiguous buffer, and one a row over pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.check.cases.case import Case, like
from pallas_kernels.mla_attention.triton.attend import attend
from pallas_kernels.mla_attention.triton.combine import combine
from pallas_kernels.mla_attention.triton.cost import attend_cost, combine_cost
from pallas_kernels.mla_attention.triton.plan import Plan, make_plan
from pallas_kernels.shapes import Shape

DTYPES = ((jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float8_e4m3fn))
"""Of queries and of latents."""


def mla_attention(shape: Shape) -> Iterator[Case]:
    """The kernels for every kind of latents, named by their dtype; the combining one by that of the queries."""
    for queries, latents in DTYPES:
        yield _attend(shape, "forward", jnp.dtype(queries), jnp.dtype(latents))
        yield _attend(shape, "step", jnp.dtype(queries), jnp.dtype(latents))
    for queries, _ in DTYPES[:2]:
        yield _combine(shape, jnp.dtype(queries))


def _call(shape: Shape, kind: str, queries: jnp.dtype, latents: jnp.dtype) -> tuple[Plan, tuple[Any, ...]]:
    """The plan of a call and what `attend` takes: q, the pool, page table, start and lengths."""
    batch, tokens = (1, shape.tokens) if kind == "forward" else (shape.rows, 1)
    page, pages = (shape.tokens, 1) if kind == "forward" else (shape.page, shape.context // shape.page)
    channels = shape.latents + shape.shared
    q = like((batch, tokens, shape.heads, channels), queries)
    plan = make_plan(q, like((batch * pages, page, channels), latents), pages, shape.latents)
    counts = like((batch,), jnp.int32)
    pool = like((batch * pages * page, channels), latents)
    table = like((batch, pages), jnp.int32)
    return plan, (like((batch, plan.num_rows, channels), queries), pool, table, counts, counts)


def _attend(shape: Shape, kind: str, queries: jnp.dtype, latents: jnp.dtype) -> Case:
    plan, arguments = _call(shape, kind, queries, latents)

    def run(*arguments: Any) -> Any:
        return attend(*arguments, plan=plan, scale=1.0)

    cost = attend_cost(plan, arguments[0].shape[0], queries, latents)
    name = "mla_attend, prefill" if kind == "forward" else "mla_attend, decode"
    lacking = ("sm_80",) if latents.itemsize == 1 else ()
    return Case(
        name, ("mla_attend",), 1, kind, shape.name, latents.name, run, arguments, cost, lacking=lacking
    )


def _combine(shape: Shape, queries: jnp.dtype) -> Case:
    plan, (*_, counts) = _call(shape, "step", queries, queries)

    def run(*arguments: Any) -> Any:
        return combine(*arguments, plan=plan, dtype=queries)

    splits = (shape.rows, plan.splits, shape.heads)
    arguments = (like((*splits, plan.rank)), like(splits), counts, counts)
    cost = combine_cost(plan, shape.rows, queries)
    return Case("mla_combine", ("mla_combine",), 1, "step", shape.name, queries.name, run, arguments, cost)
