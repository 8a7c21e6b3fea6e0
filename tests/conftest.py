"""Strict dtypes, shape checks and the compilation cache for every test, and the goldens' loader."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from safetensors.flax import load_file

from own_network import enter_own_network

gc.disable()  # until all is imported
jaxtyping.install_import_hook(["pallas_kernels", "kda_jax"], "beartype.beartype")

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"

SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")
BYTE_TOKENIZER = {
    "tokenizer_class": "ByteTokenizer",
    "bos_token": "<bos>",
    "added_tokens_decoder": {str(256 + i): {"content": name} for i, name in enumerate(SPECIAL)},
}


def pytest_configure(config: pytest.Config) -> None:
    """Servers of tests, Mooncake's clients above all, which listen on all interfaces, are reached by nobody else. With
    --quick-compile XLA makes slower programs in a third of the time, here and in the tests' own processes."""
    enter_own_network()
    if config.getoption("--quick-compile"):
        flags = ["--xla_backend_optimization_level=0"]
        if jax.__version_info__ < (0, 11):  # the flag's last version
            flags.append("--xla_cpu_use_fusion_emitters=false")
        os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])


@pytest.hookimpl(trylast=True)  # of those that run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, then those with many: no core waits for the last one."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (-slow[item.path], -count[item.path]))


def pytest_collection_finish() -> None:
    """What was imported stays, and is not looked through again; tracing makes much that is no garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What tests may trade for time."""
    parser.addoption("--quick-compile", action="store_true", help="compile with little optimisation")
    parser.addoption(
        "--cache-steps", type=int, default=1500, help="steps of each random history of the cache"
    )
    parser.addoption(
        "--engine-events", type=int, default=5000, help="events of the simulation of the engine's scheduler"
    )


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


@pytest.fixture(scope="session")
def cache_steps(request: pytest.FixtureRequest) -> int:
    """How many steps the cache's state machines take."""
    return int(request.config.getoption("--cache-steps") or 0)


@pytest.fixture(scope="session")
def engine_events(request: pytest.FixtureRequest) -> int:
    """How many events the simulation of the engine's scheduler has."""
    return int(request.config.getoption("--engine-events") or 0)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random byte-level model of two narrow layers."""
    # behind the hook that checks their shapes
    from kda_jax.weights import save
    from random_model import random_model, small_config

    folder = tmp_path_factory.mktemp("models") / "bytes"
    config = small_config(vocab_size=256 + len(SPECIAL), model_max_length=4096)
    save(random_model(config, seed=3), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(BYTE_TOKENIZER))
    return folder
