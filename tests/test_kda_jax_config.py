"""Model configs: checks, presets, and Hugging Face's form of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kda_jax.config import ModelConfig

PRESETS = ("kimi_linear_48b", "kimi_k3", "tiny", "bench_41m")
SMALL: dict[str, Any] = dict(
    vocab_size=11, hidden_size=8, layers=("kda", "mla"), mlps=("dense", "moe"), intermediate_size=16,
    model_max_length=64, kda_num_heads=2, kda_head_dim=4, num_heads=2, kv_lora_rank=4, qk_nope_head_dim=4,
    qk_rope_head_dim=2, v_head_dim=4, num_experts=8, experts_per_token=2, moe_intermediate_size=4,
)  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_the_way_through_hugging_face(preset: str) -> None:
    config = getattr(ModelConfig, preset)()
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    "options",
    [
        {"kda_v_head_dim": 6, "kda_num_v_heads": 4, "latent_norm_eps": 1e-5, "eos_token_id": (3, 4)},
        {"gate_lower_bound": -5.0, "full_rank_gate": True, "mla_output_gate": True, "q_lora_rank": 3},
        {"tie_embeddings": True, "num_expert_groups": 4, "topk_groups": 2, "moe_renormalize": False},
        {"mlps": ("dense", "dense"), "num_experts": 0, "experts_per_token": 0},
        {
            **{"attn_res_block_size": 2, "routed_expert_hidden_size": 64, "latent_moe_norm": True},
            **{
                "situ_beta": 3.0,
                "situ_linear_beta": 20.0,
                "quantization": "mxfp4",
                "moe_intermediate_size": 32,
            },
        },
    ],
    ids=["value-heads", "gates", "groups", "dense", "k3"],
)
def test_options_survive_the_way_through_hugging_face(options: dict[str, Any]) -> None:
    config = ModelConfig(**SMALL | options)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_presets_have_the_published_layers() -> None:
    linear, k3 = ModelConfig.kimi_linear_48b(), ModelConfig.kimi_k3()
    assert [i + 1 for i, kind in enumerate(linear.layers) if kind == "mla"] == [4, 8, 12, 16, 20, 24, 27]
    assert [i + 1 for i, kind in enumerate(k3.layers) if kind == "mla"] == [*range(4, 93, 4), 93]
    assert (linear.num_layers, k3.num_layers) == (27, 93)
    assert linear.mlps == ("dense", *("moe",) * 26)
    assert linear.conv_channels == 12288
    assert linear.latent_size == 576
    assert linear.k3_parts == ()
    assert "attn_res_block_size" in k3.k3_parts


def test_reads_the_golden_config(goldens: Path) -> None:
    config = ModelConfig.from_hf(json.loads((goldens / "kimi_linear_tiny" / "config.json").read_text()))
    assert config.layers == ("kda", "kda", "kda", "mla", "kda")
    assert config.mlps == ("dense", "moe", "moe", "moe", "moe")
    assert (config.num_expert_groups, config.topk_groups, config.experts_per_token) == (2, 1, 3)
    assert (config.rms_norm_eps, config.latent_norm_eps, config.routed_scaling_factor) == (1e-5, 1e-6, 2.446)
    assert config.stop_tokens == (2,)


def test_reads_the_text_part_of_k3_and_the_names_transformers_has_for_fields() -> None:
    text = ModelConfig.kimi_linear_48b().to_hf()
    for old, new in (("num_experts_per_token", "num_experts_per_tok"), ("topk_group", "topk_group")):
        text[new] = text.pop(old)
    del text["layer_types"], text["mlp_layer_types"]
    assert ModelConfig.from_hf(text) == ModelConfig.kimi_linear_48b()
    assert (
        ModelConfig.from_hf({"model_type": "kimi_k3", "text_config": text}) == ModelConfig.kimi_linear_48b()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"linear_attn_config": None}, "linear_attn_config.num_heads"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"moe_router_activation_func": "softmax"}, "'softmax'"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"layer_types": ["full_attention"]}, "27 layers"),
        ({"quantization_config": {"format": "int4"}}, "'int4'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_says_what_is_wrong_with_a_foreign_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(ModelConfig.kimi_linear_48b().to_hf() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"conv_size": 1}, "conv_size=1"),
        ({"layers": ("kda",)}, "1 and 2"),
        ({"layers": ("kda", "gdn")}, "gdn"),
        ({"kda_num_v_heads": 3}, "multiple of"),
        ({"gate_lower_bound": 0.0}, "negative"),
        ({"experts_per_token": 9}, "1..8"),
        ({"attn_res_block_size": 0}, "attn_res_block_size=0 must be positive"),
        ({"situ_beta": 4.0}, "both be positive"),
        ({"situ_beta": 4.0, "situ_linear_beta": 0.0}, "both be positive"),
        ({"latent_moe_norm": True}, "wants routed_expert_hidden_size"),
        ({"routed_expert_hidden_size": 0}, "routed_expert_hidden_size=0"),
        ({"quantization": "mxfp4"}, "8 and 4 must be multiples of 32"),
        ({"num_expert_groups": 3}, "divide num_experts=8"),
        ({"num_expert_groups": 8, "topk_groups": 2}, "two best"),
        ({"num_expert_groups": 4, "topk_groups": 1, "experts_per_token": 3}, "1..2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_says_which_sizes_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SMALL | change)


def test_is_a_value() -> None:
    config = ModelConfig(**SMALL)
    assert hash(config) == hash(ModelConfig(**SMALL))
    assert (config.kda_value_dim, config.kda_value_heads) == (4, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 3  # type: ignore[misc]
