"""The kernels as a device would get them: lowered for CUDA and for TPUs on a machine without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lowering import CALL, lowered
from pallas_kernels import Gate, KDAParameters, kda_decode, kda_draft, kda_prefill, kda_step

HEADS, KEYS = 4, 128


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


GRADIENTS = {
    "cuda": ("triton", ["kda_states", "kda_retreat", "kda_contract", "kda_pull_back"], 2 + 1),
    "tpu": ("tpu", ["kda_states", "kda_backward"], 1),
}
"""Who makes it, of what kernels, and how many of the forward pass run beside them."""


@pytest.mark.parametrize("keys, values", [(KEYS, KEYS), (96, 80)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("platform", GRADIENTS)
def test_a_gradient_is_its_kernels(
    platform: str, packed: bool, dtype: jnp.dtype, keys: int, values: int
) -> None:
    implementation, kernels, forward = GRADIENTS[platform]

    def run(*x: jax.Array) -> tuple[jax.Array, ...]:
        layout = {"cu_seqlens": [0, 1, 90]} if packed else {}
        return kda_prefill(*x, implementation=implementation, **layout)

    def gradient(*x: jax.Array) -> tuple[jax.Array, ...]:
        results, pull = jax.vjp(run, *x)
        return *results, *pull(results)

    text = lowered(platform, gradient, *sequence(192, dtype, keys, values))
    assert text.count(CALL[platform]) == forward + len(kernels)
    assert all(kernel in text for kernel in kernels)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_no_maximum_on_a_gpu_drops_a_nan(dtype: jnp.dtype) -> None:
    """There the greater of NaN and a number is the number: a log decay of NaN would read as the strongest decay."""

    def gradient(*x: jax.Array) -> tuple[jax.Array, ...]:
        results, pull = jax.vjp(functools.partial(kda_prefill, implementation="triton"), *x)
        return *results, *pull(results)

    assert "maxnumf" not in lowered("cuda", gradient, *sequence(192, dtype, KEYS, KEYS))


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
@pytest.mark.parametrize("platform", KERNELS)
def test_a_step_is_one_kernel(platform: str, keys: int) -> None:
    rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in sequence(8, jnp.bfloat16, keys, KEYS)]
    pool = jax.ShapeDtypeStruct((20, HEADS, keys, KEYS), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    implementation = KERNELS[platform][0]
    text = lowered(
        platform, lambda *x: kda_step(*x[:6], slots=x[6], implementation=implementation), *rows, pool, slots
    )
    assert text.count(CALL[platform]) == 1
    if platform == "cuda":  # between reading a state and writing it where it lay
        assert "debug_barrier" in text


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
