"""A checkpoint in Kimi K3's layout with random weights, of a size that a test machine can hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from kda_jax.config import ModelConfig
from kda_jax.weights.names import hf_shapes, parameters_and_nbytes
from kda_jax.weights.table import BFLOAT16_KIND, FLOAT32_KIND, SCALE_KIND

Shapes = dict[str, tuple[tuple[int, ...], str]]


def config_of_size(nbytes: int) -> ModelConfig:
    """Kimi K3 at a quarter of its widths, three layers of it, with as many experts as `nbytes` take.

    Raises:
        ValueError: if `nbytes` do not hold the 16 experts that a token goes to.
    """
    released = ModelConfig.kimi_k3()
    small = dataclasses.replace(
        released,
        vocab_size=released.vocab_size // 16,
        hidden_size=released.hidden_size // 4,
        intermediate_size=released.intermediate_size // 4,
        layers=("kda", "kda", "mla"),
        mlps=("dense", "moe", "moe"),
        kda_num_heads=released.kda_num_heads // 4,
        kda_num_v_heads=None,
        num_heads=released.num_heads // 4,
        q_lora_rank=384,
        attn_res_block_size=2,
        routed_expert_hidden_size=896,
        moe_intermediate_size=768,
        num_experts=released.experts_per_token,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    least, more = (
        parameters_and_nbytes(hf_shapes(dataclasses.replace(small, num_experts=count)))[1]
        for count in (small.num_experts, small.num_experts + 1)
    )
    if nbytes < least:
        raise ValueError(
            f"a checkpoint of {nbytes:,} bytes cannot hold {small.num_experts} experts; take {least:,} at least"
        )
    return dataclasses.replace(small, num_experts=small.num_experts + (nbytes - least) // (more - least))


def write(
    config: ModelConfig,
    folder: Path,
    num_shards: int,
    *,
    seed: int = 0,
    on_shard: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes `config.json`, an index and shards of about the same size; holds one shard in memory.

    Args:
        config: whose tensors.
        folder: an empty folder.
        num_shards: files; a tensor lies whole in one of them.
        seed: of the weights.
        on_shard: told the name of each file that is written.
    """
    shapes, rng = hf_shapes(config), np.random.default_rng(seed)
    total = parameters_and_nbytes(shapes)[1]
    shards: list[Shapes] = [{} for _ in range(num_shards)]
    before = 0
    for name, entry in shapes.items():
        shards[before * num_shards // total][name] = entry
        before += parameters_and_nbytes({name: entry})[1]
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        tensors = {name: _random(rng, name, *entry, config) for name, entry in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        on_shard(file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**config.to_hf(), "dtype": "bfloat16"}))


def _random(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: str, config: ModelConfig
) -> np.ndarray:
    """Random bits, but for those that would make a number too large: floats lie in (-2, 2)."""
    if kind == SCALE_KIND:
        return rng.integers(118, 122, shape, np.uint8)
    if kind == FLOAT32_KIND:
        bits = rng.integers(0, 1 << 32, shape, np.uint32) & np.uint32(0xBFFFFFFF)
        if name.endswith("A_log"):
            bits[config.kda_value_heads :] = 0  # the padding
        return bits.view(np.float32)
    if kind == BFLOAT16_KIND:
        return (rng.integers(0, 1 << 16, shape, np.uint16) & np.uint16(0xBFFF)).view(ml_dtypes.bfloat16)
    return rng.integers(0, 256, shape, np.uint8)
