"""The Triton kernels as a GPU would get them: lowered for CUDA on a machine without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import kda_prefill, kda_step

CALL = "__gpu$xla.gpu.triton"
HEADS, KEYS = 4, 128


def lowered(function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> str:
    """The program's text for CUDA."""
    scope = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):  # it asks which GPU
        gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        scope = use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu))
    with scope:
        known = [export.DisabledSafetyCheck.custom_call(CALL)]
        program = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=known)
        return program(*arguments).mlir_module()


def sequence(tokens: int, dtype: jnp.dtype, keys: int, values: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of q, k, v, g and beta."""
    shapes = [(keys, dtype), (keys, dtype), (values, dtype), (keys, jnp.float32)]
    whole = [jax.ShapeDtypeStruct((1, tokens, HEADS, size), dtype) for size, dtype in shapes]
    return [*whole, jax.ShapeDtypeStruct((1, tokens, HEADS), jnp.float32)]


@pytest.mark.parametrize("boundaries", [None, [100, 64]], ids=["whole", "boundaries"])
@pytest.mark.parametrize("keys, values", [(KEYS, KEYS), (96, 80)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_prefill_is_three_kernels(
    dtype: jnp.dtype, keys: int, values: int, boundaries: list[int] | None
) -> None:
    def run(*x: jax.Array) -> tuple[jax.Array, ...]:
        return kda_prefill(*x, boundaries=boundaries, implementation="triton")

    text = lowered(run, *sequence(192, dtype, keys, values))
    assert text.count(CALL) == 3
    assert all(f"kda_{name}" in text for name in ("intra", "merge", "state"))


@pytest.mark.parametrize("keys", [KEYS, 96])
def test_a_step_is_one_kernel(keys: int) -> None:
    rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in sequence(8, jnp.bfloat16, keys, KEYS)]
    pool = jax.ShapeDtypeStruct((20, HEADS, keys, KEYS), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = lowered(lambda *x: kda_step(*x[:6], slots=x[6], implementation="triton"), *rows, pool, slots)
    assert text.count(CALL) == 1
