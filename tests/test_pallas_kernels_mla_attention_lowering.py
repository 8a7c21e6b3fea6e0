"""Latent attention as a device would get it: lowered for CUDA and for TPUs on a machine without one, and counted."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from lowering import CALL, lowered
from pallas_kernels import mla_attention
from pallas_kernels.check.cases.mla_attention import mla_attention as cases
from pallas_kernels.mla_attention import tpu
from pallas_kernels.mla_attention.triton.cost import attend_cost, combine_cost
from pallas_kernels.mla_attention.triton.plan import make_plan, pieces
from pallas_kernels.shapes import SHAPES

HEADS, RANK, ROPE = 32, 512, 64
PLATFORMS = {"cuda": "triton", "tpu": "tpu"}
CALLS = {"prefill": (128, 256, None), "decode": (1, 64, 32), "short decode": (1, 64, 2)}
"""Queries a row, rows of a page or of the buffer, pages a row."""


@pytest.mark.parametrize(
    "latents", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=["f32", "bf16", "fp8"]
)
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_call_is_its_kernels(platform: str, kind: str, latents: jnp.dtype) -> None:
    tokens, page, pages = CALLS[kind]
    queries = jnp.float32 if latents == jnp.float32 else jnp.bfloat16
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    q = jax.ShapeDtypeStruct((2, tokens, HEADS, RANK + ROPE), queries)
    pool = jax.ShapeDtypeStruct((2 if pages is None else 2 * pages, page, RANK + ROPE), latents)
    table = () if pages is None else (jax.ShapeDtypeStruct((2, pages), jnp.int32),)
    run = functools.partial(mla_attention, rank=RANK, implementation=PLATFORMS[platform])

    def call(q, latents, start, lengths, *table):
        options = {"page_table": table[0]} if table else {}
        return run(q, latents, start=start, lengths=lengths, **options)

    text = lowered(platform, call, q, pool, counts, counts, *table)
    split = platform == "cuda" and kind == "decode"
    assert text.count(CALL[platform]) == (2 if split else 1)
    assert text.count("mla_attend") >= 1 and ("mla_combine" in text) == split


@pytest.mark.parametrize(
    "latents", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=["f32", "bf16", "fp8"]
)
def test_pages_of_any_size_lower_for_gpus(latents: jnp.dtype) -> None:
    q = jax.ShapeDtypeStruct((2, 1, HEADS, RANK + ROPE), jnp.bfloat16)
    pool, start = (
        jax.ShapeDtypeStruct((9, 60, RANK + ROPE), latents),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )

    def call(q, latents, start):
        table = [[0, 1, 2, 3], [5, 6, 7, 8]]
        return mla_attention(q, latents, rank=RANK, start=start, page_table=table, implementation="triton")

    assert lowered("cuda", call, q, pool, start).count(CALL["cuda"]) == 1


@pytest.mark.parametrize("platform", PLATFORMS)
def test_odd_widths_lower(platform: str) -> None:
    shapes = ((2, 5, 3, 27), (2, 100, 27))
    call = functools.partial(mla_attention, rank=20, implementation=PLATFORMS[platform])
    text = lowered(platform, call, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert text.count(CALL[platform]) == 1


IN_FULL = "(Precision.HIGHEST, Precision.HIGHEST)"


@pytest.mark.parametrize(
    ("implementation", "latents", "wanted"),
    [
        ("triton", jnp.float32, {"TF32_TF32_F32_X3"}),
        ("triton-interpret", jnp.float32, {IN_FULL}),
        ("tpu", jnp.float32, {IN_FULL}),
        ("triton", jnp.bfloat16, set()),
        ("tpu", jnp.bfloat16, set()),
    ],
)
def test_float32_is_multiplied_in_full(implementation: str, latents: jnp.dtype, wanted: set[str]) -> None:
    call = functools.partial(mla_attention, rank=64, implementation=implementation)
    shapes = ((1, 5, 4, 96), (1, 64, 96))
    program = str(jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct(shape, latents) for shape in shapes)))
    assert "dot_general[" in program
    assert set(re.findall(r"precision=(.*)", program)) == wanted


@pytest.mark.parametrize("rank, rope", [(1, 0), (20, 7), (16, 1), (136, 12), (512, 64)])
def test_no_operand_on_a_gpu_has_fewer_than_16_channels(rank: int, rope: int) -> None:
    q, latents = (jax.ShapeDtypeStruct((1, *shape, rank + rope), jnp.float32) for shape in ((9, 3), (64,)))
    plan = make_plan(q, latents, 1, rank)
    counts = [count for ends in ((0, plan.rank), (plan.rank, plan.channels)) for _, count in pieces(*ends)]
    assert min(counts) >= 16 and all(count & (count - 1) == 0 for count in counts)
    assert plan.rank >= rank and sum(counts) == plan.channels >= rank + rope


def test_decode_reads_every_latent_row_once() -> None:
    q, pool = jnp.zeros((2, 1, 4, 80), jnp.bfloat16), jnp.zeros((40, 64, 80), jnp.bfloat16)
    plan = make_plan(q, pool, 40, 64)
    rows, heads, splits = 40 * 64, 2 * 4, 3
    half = jnp.dtype(jnp.bfloat16)
    attended, combined = attend_cost(plan, 2, half, half), combine_cost(plan, 2, half)
    assert attended.bytes_accessed == 2 * (2 * rows + heads) * 80 + heads * splits * 4 * (64 + 1)
    assert combined.bytes_accessed == heads * (splits * 4 * (64 + 1) + 2 * 64)
    assert attended.flops == 2 * heads * rows * (80 + 64)
    few = jnp.zeros((1, 10, 4, 80), jnp.bfloat16)
    prefill = make_plan(few, pool, 1, 64)
    counted = attend_cost(prefill, 1, half, half)
    assert counted.transcendentals == 4 * sum(range(64 - 9, 64 + 1))
    also = tpu.cost(tpu.make_plan(few, pool, 1, 64), 1, 80, half, half)  # without the 40 norms
    assert (also.flops, also.transcendentals) == (counted.flops, counted.transcendentals)
    assert also.bytes_accessed == counted.bytes_accessed - 4 * 40


def test_float8_is_compiled_only_where_it_can_be_read() -> None:
    for case in cases(SHAPES[-1]):
        assert case.lacking == (("sm_80",) if case.dtype == "float8_e4m3fn" else ())
