"""The kernels as a device would get them: lowered for CUDA and for TPUs on a machine without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import Gate, kda_prefill, kda_step

CALL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
HEADS, KEYS = 4, 128


def lowered(platform: str, function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> str:
    """The program's text for a platform."""
    scope = contextlib.nullcontext()
    if platform == "cuda" and jax.__version_info__ >= (0, 11):  # it asks which GPU
        gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        scope = use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu))
    with scope:
        known = [export.DisabledSafetyCheck.custom_call(CALL[platform])]
        program = export.export(jax.jit(function), platforms=[platform], disabled_checks=known)
        return program(*arguments).mlir_module()


def sequence(tokens: int, dtype: jnp.dtype, keys: int, values: int) -> list[jax.ShapeDtypeStruct]:
    """Shapes of q, k, v, g and beta."""
    shapes = [(keys, dtype), (keys, dtype), (values, dtype), (keys, jnp.float32)]
    whole = [jax.ShapeDtypeStruct((1, tokens, HEADS, size), dtype) for size, dtype in shapes]
    return [*whole, jax.ShapeDtypeStruct((1, tokens, HEADS), jnp.float32)]


KERNELS = {"cuda": ("triton", ["kda_intra", "kda_state"]), "tpu": ("tpu", ["kda_chunks"])}


@pytest.mark.parametrize("boundaries", [None, [100, 64]], ids=["whole", "boundaries"])
@pytest.mark.parametrize("keys, values", [(KEYS, KEYS), (96, 80)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("platform", KERNELS)
def test_a_prefill_is_its_kernels(
    platform: str, dtype: jnp.dtype, keys: int, values: int, boundaries: list[int] | None
) -> None:
    implementation, kernels = KERNELS[platform]

    def run(*x: jax.Array) -> tuple[jax.Array, ...]:
        return kda_prefill(*x, boundaries=boundaries, implementation=implementation)

    text = lowered(platform, run, *sequence(192, dtype, keys, values))
    assert text.count(CALL[platform]) == len(kernels)
    assert all(kernel in text for kernel in kernels)


GRADIENT = ("kda_states", "kda_retreat", "kda_contract", "kda_pull_back")


@pytest.mark.parametrize("keys, values", [(KEYS, KEYS), (96, 80)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_gradient_is_its_kernels(dtype: jnp.dtype, keys: int, values: int) -> None:
    def pull(*x: jax.Array) -> tuple[jax.Array, ...]:
        results, back = jax.vjp(lambda *x: kda_prefill(*x, implementation="triton"), *x)
        return *results, *back(results)

    text = lowered("cuda", pull, *sequence(192, dtype, keys, values))
    assert text.count(CALL["cuda"]) == 2 + 1 + len(GRADIENT)
    assert all(kernel in text for kernel in GRADIENT)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_prelude_is_inside_the_kernels(repeats: int, dtype: jnp.dtype, lower_bound: float | None) -> None:
    """Beside them the program neither computes nor copies anything of the tokens."""
    q, k, v, _, beta = sequence(192, dtype, KEYS, KEYS)
    q, k = (jax.ShapeDtypeStruct((1, 192, HEADS // repeats, KEYS), dtype) for _ in (q, k))
    z = jax.ShapeDtypeStruct(v.shape, dtype)
    parameters = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((HEADS,), (HEADS, KEYS)))

    def run(q, k, v, z, beta, A_log, bias):
        gate = Gate(A_log, bias, lower_bound)
        return kda_prefill(q, k, v, z, beta, qk_l2norm=True, gate=gate, implementation="triton")

    text = lowered("cuda", run, q, k, v, z, beta, *parameters)
    assert text.count(CALL["cuda"]) == 2
    sized = [line for line in text.splitlines() if "stablehlo." in line and "192x" in line]
    assert sized and all("stablehlo.reshape" in line or CALL["cuda"] in line for line in sized)


@pytest.mark.parametrize("keys", [KEYS, 96])
def test_a_step_is_one_kernel(keys: int) -> None:
    rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in sequence(8, jnp.bfloat16, keys, KEYS)]
    pool = jax.ShapeDtypeStruct((20, HEADS, keys, KEYS), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = lowered(
        "cuda", lambda *x: kda_step(*x[:6], slots=x[6], implementation="triton"), *rows, pool, slots
    )
    assert text.count(CALL["cuda"]) == 1
