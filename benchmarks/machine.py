"""What this machine can do at best: the yardsticks that shares are given of, measured in the same run."""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Contender, race


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_version(package: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, object]:
    """The processor, its cores, the interpreter and the versions that decide the figures."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        processor = models[0] if models else processor
    packages = ("jax", "jaxlib", "flax", "torch", "transformers")
    return {
        "processor": processor,
        "cores": num_cores(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in packages},
    }


def measure(*, size: int = 2048, read_mib: int = 512, rounds: int = 9) -> dict[str, float]:
    """Measure the rates of float32 matrix products and of reading memory.

    The matrix product is one jitted `size`^3 product, 2 size^3 operations. Reading is the better of two
    readers: a jitted matrix-vector product, and numpy sums by one thread a core, both over `read_mib` MiB,
    more than any cache holds.

    Args:
        size: rows and columns of the two matrices.
        read_mib: MiB that one read passes over.
        rounds: calls; the fastest counts.

    Returns:
        `matmul_gflops` (10^9 operations a second) and `read_gb_s` (10^9 bytes a second), with the median of
        each.
    """
    rng = np.random.default_rng(0)
    left, right = (jnp.asarray(rng.standard_normal((size, size), dtype=np.float32)) for _ in range(2))
    columns = 4096
    rows = max(1, read_mib * 2**20 // (4 * columns))
    block = np.ones((rows, columns), np.float32)
    matrix, vector = jnp.asarray(block), jnp.ones((columns,), jnp.float32)
    product = jax.jit(jnp.matmul)
    parts = np.array_split(block, num_cores())

    with ThreadPoolExecutor(num_cores()) as pool:
        timings = race(
            [
                Contender(name="matmul", call=lambda _: product(left, right).block_until_ready()),
                Contender(name="matvec", call=lambda _: product(matrix, vector).block_until_ready()),
                Contender(name="sums", call=lambda _: list(pool.map(np.sum, parts))),
            ],
            rounds=rounds,
            budget_s=10.0,
        )
    flops, nbytes = 2.0 * size**3, float(block.nbytes)
    readers = (timings["matvec"], timings["sums"])
    return {
        "matmul_gflops": flops / timings["matmul"].min_ms / 1e6,
        "matmul_median_gflops": flops / timings["matmul"].median_ms / 1e6,
        "read_gb_s": nbytes / min(reader.min_ms for reader in readers) / 1e6,
        "read_median_gb_s": nbytes / min(reader.median_ms for reader in readers) / 1e6,
    }


def best(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """The better of two measurements, key by key: a busy moment can only lower a rate."""
    return {key: max(first[key], second[key]) for key in first}
