"""Strict dtypes, shape checks and the compilation cache for every test, and the goldens' loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import load_file

jaxtyping.install_import_hook(["pallas_kernels", "kda_jax"], "beartype.beartype")

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"

BYTE_TOKENIZER = {
    "tokenizer_class": "ByteTokenizer",
    "bos_token": "<bos>",
    "added_tokens_decoder": {
        str(256 + i): {"content": name} for i, name in enumerate(("<bos>", "<eos>", "<pad>"))
    },
}

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
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random byte-level model of two narrow layers."""
    import kda_jax  # behind the hook that checks its shapes

    folder = tmp_path_factory.mktemp("models") / "bytes"
    config = kda_jax.ModelConfig(
        vocab_size=260,
        hidden_size=32,
        layers=("kda", "mla"),
        mlps=("dense", "moe"),
        intermediate_size=48,
        model_max_length=4096,
        kda_num_heads=2,
        kda_head_dim=16,
        num_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_experts=4,
        experts_per_token=2,
        moe_intermediate_size=16,
        num_shared_experts=1,
    )
    kda_jax.save(kda_jax.Model(config, rngs=nnx.Rngs(3)), folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(BYTE_TOKENIZER))
    return folder
