"""Strict dtypes, shape checks and the compilation cache for every test, and the goldens' loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from safetensors.flax import load_file

jaxtyping.install_import_hook(["pallas_kernels", "kda_jax"], "beartype.beartype")

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of golden files (its README says what each holds)."""
    return GOLDENS


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Loads a golden file: `golden("kda_ops.safetensors")` gives its arrays by name, as numpy."""
    return lambda name: {key: np.asarray(value) for key, value in load_file(GOLDENS / name).items()}
