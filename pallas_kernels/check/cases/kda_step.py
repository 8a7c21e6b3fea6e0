"""`kda_step` on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.check.cases.case import Case, like
from pallas_kernels.kda.triton.cost import step_cost
from pallas_kernels.kda.triton.step import step
from pallas_kernels.shapes import Shape


def kda_step(shape: Shape) -> Iterator[Case]:
    """The step over a pool four times the batch."""
    rows = (shape.rows, shape.heads)
    yield Case(
        "kda_step",
        ("kda_step",),
        1,
        "step",
        shape.name,
        "float32",
        functools.partial(step, interpret=False),
        (
            *(like((*rows, size)) for size in (shape.keys, shape.keys, shape.values, shape.keys)),
            like(rows),
            like((4 * shape.rows, shape.heads, shape.keys, shape.values)),
            like((shape.rows,), jnp.int32),
        ),
        step_cost(*rows, shape.keys, shape.values),
    )
