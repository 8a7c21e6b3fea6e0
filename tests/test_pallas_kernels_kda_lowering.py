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

from pallas_kernels import KDAParameters, kda_decode, kda_draft, kda_prefill, kda_step

CALL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
HEADS, KEYS = 4, 128


def lowered(platform: str, function: Callable[..., Any], *arguments: Any) -> str:
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


KERNELS = {"cuda": ("triton", ["kda_intra", "kda_merge", "kda_state"]), "tpu": ("tpu", ["kda_chunks"])}


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


@pytest.mark.parametrize("keys", [KEYS, 96])
def test_a_step_is_one_kernel(keys: int) -> None:
    rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in sequence(8, jnp.bfloat16, keys, KEYS)]
    pool = jax.ShapeDtypeStruct((20, HEADS, keys, KEYS), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    text = lowered(
        "cuda", lambda *x: kda_step(*x[:6], slots=x[6], implementation="triton"), *rows, pool, slots
    )
    assert text.count(CALL["cuda"]) == 1


@pytest.mark.parametrize("keys", [KEYS, 96])
@pytest.mark.parametrize("operator, heads", [(kda_decode, HEADS), (kda_decode, 2), (kda_draft, HEADS)])
def test_a_decode_step_is_one_kernel(operator: Callable[..., Any], heads: int, keys: int) -> None:
    """State and window are written where they lie, but no window whose channels are shared, and by drafts nothing."""
    lead = (8,) if operator is kda_decode else (8, 3)
    channels = 2 * heads * keys + HEADS * KEYS

    def like(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    sizes = ((channels,), (HEADS, keys), (HEADS,), (HEADS, KEYS))
    layer = KDAParameters(
        like(4, channels), like(HEADS, dtype=jnp.float32), like(HEADS, keys, dtype=jnp.float32), like(KEYS)
    )
    pools = like(20, HEADS, keys, KEYS, dtype=jnp.float32), like(20, 3, channels)

    def run(slots: jax.Array, *x: Any) -> tuple[jax.Array, ...]:
        return operator(*x, slots=slots, eps=1e-5, implementation="triton")

    tokens = [like(*lead, *rest) for rest in sizes]
    text = lowered("cuda", run, like(8, dtype=jnp.int32), *tokens, layer, *pools)
    assert text.count(CALL["cuda"]) == 1
    in_place = 0 if operator is kda_draft else 2 if heads == HEADS else 1
    assert text.count("output_operand_alias<") == in_place
