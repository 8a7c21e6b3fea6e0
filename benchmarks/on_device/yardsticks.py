"""What the device can do at best, measured in the same run: copying memory, and bfloat16 products."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.on_device.clock import Call, time_calls


def measure(*, gib: float = 2.0, size: int = 8192, rounds: int = 11) -> dict[str, float]:
    """Measures the device's rates.

    Args:
        gib: GiB that one copy reads, and writes again.
        size: rows and columns of the two random matrices, 2 size^3 operations a product.
        rounds: timed samples; the median counts.

    Returns:
        `copy_bytes_per_s`, counting bytes read and written, and `matmul_flops_per_s`, in bfloat16.
    """
    data = jnp.zeros((int(gib * 2**28),), jnp.float32)
    left, right = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    copy, product = jax.jit(lambda x: x + 1), jax.jit(jnp.matmul)
    timings = time_calls(
        {
            "copy": Call(lambda: copy(data), jax.block_until_ready),
            "matmul": Call(lambda: product(left, right), jax.block_until_ready),
        },
        rounds=rounds,
    )
    return {
        "copy_bytes_per_s": 2e3 * data.nbytes / timings["copy"].median_ms,
        "matmul_flops_per_s": 2e3 * size**3 / timings["matmul"].median_ms,
    }
