"""What the kernels' bodies share: a call's static sizes, products, and rows read by the table."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.lax import DotAlgorithmPreset as Preset
from jax.lax import Precision

BLOCK = 16
"""Rows of a sub-chunk: the smallest operand of a matrix unit, and what one substitution inverts."""

LOG2_E = 1.4426950408889634

MIN_LOG2_DECAY = -160.0
"""exp2 of it is 0 in float32; more would only cost digits of the sums it stands in."""

Columns: TypeAlias = slice | pl.Slice


class Plan(NamedTuple):
    """The static sizes of a call."""

    num_tokens: int  # rows of the flat token axis
    heads: int  # of values
    keys: int  # a multiple of key_slice
    values: int  # a multiple of value_tile
    chunk: int = 64
    key_slice: int = 32
    value_tile: int = 32
    work: jnp.dtype = jnp.dtype(
        jnp.float32
    )  # of what kernels hand each other, and of the state as an operand
    ends: jnp.dtype | None = None  # of the keys seen from the chunk's end; None: work
    interpret: bool = False
    repeats: int = 1  # value heads that share a head of queries and keys
    qk_l2norm: bool = False
    gated: bool = False  # whether g is a raw projection, of which the gate is taken
    lower_bound: float | None = None  # of that gate

    @property
    def slices(self) -> int:
        """Slices of a head's key channels."""
        return self.keys // self.key_slice

    @property
    def squares(self) -> tuple[jnp.dtype, jnp.dtype]:
        """Of the inverse and of the pairs. Of unit keys neither exceeds 2: there float16 has the digits of TF32."""
        if self.work == jnp.bfloat16 and self.qk_l2norm:
            return jnp.dtype(jnp.float16), jnp.dtype(jnp.float16)
        return jnp.dtype(jnp.float32), self.work

    @property
    def holds_state(self) -> bool:
        """Whether a tile of the state stays in registers from chunk to chunk."""
        return self.work == jnp.bfloat16 and self.keys in (32, 64, 128)

    @property
    def fine(self) -> Precision | Preset:
        """Products that float32 inputs ask for, and what stands in an inverse: three passes of TF32, 2e-7."""
        return Precision.HIGHEST if self.interpret else Preset.TF32_TF32_F32_X3

    @property
    def coarse(self) -> Precision | Preset:
        """Products with values: as exact as the inputs are."""
        return self.fine if self.work == jnp.float32 else Preset.TF32_TF32_F32


def product(a: jax.Array, b: jax.Array, plan: Plan, *, fine: bool = False, t: bool = False) -> jax.Array:
    """a @ b, or a @ b^T, summed in float32; float32 operands are multiplied as `plan.fine` or `plan.coarse` say."""
    axes = ((1,), (1,)) if t else ((1,), (0,))
    precision = None if a.dtype == jnp.bfloat16 else plan.fine if fine else plan.coarse
    if plan.interpret and precision == Preset.TF32_TF32_F32:
        a, b, precision = tf32(a), tf32(b), Precision.HIGHEST
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def tf32(x: jax.Array) -> jax.Array:
    """float32 rounded to 10 bits behind the point, half away from zero: interpret mode does not do so by itself."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(1 << 12)) & jnp.uint32(0xFFFFE000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def meet(plan: Plan) -> None:
    """Behind it all threads of a program see what each wrote to memory before it."""
    if not plan.interpret:
        pltriton.debug_barrier()


def rows_of(block: jax.Array | int, rows: int = BLOCK) -> jax.Array:
    """The numbers of a block's rows in its chunk."""
    return block * rows + jax.lax.broadcasted_iota(jnp.int32, (rows,), 0)


def own(rows: jax.Array, live) -> jax.Array:
    """Which of a chunk's rows, one or [R], are its own, to be broadcast over their channels."""
    mask = rows < live
    return mask[:, None] if mask.ndim else mask


def read(ref, token, live, rows: jax.Array, plan: Plan, columns: Columns) -> jax.Array:
    """The chunk's `rows`, one or [R], of an array [tokens, ...], float32; those that are not its own are zeros."""
    at = jnp.minimum(token + rows, plan.num_tokens - 1)
    return jnp.where(own(rows, live), ref[at, columns].astype(jnp.float32), 0.0)


def in_log2(g: jax.Array) -> jax.Array:
    """Natural log decays in base 2, bounded below; NaN stays, where a GPU's maximum would give the bound."""
    g = g * LOG2_E
    return jnp.where(g < MIN_LOG2_DECAY, MIN_LOG2_DECAY, g)
