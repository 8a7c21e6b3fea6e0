"""Hugging Face `config.json` (kimi_linear, and the text part of kimi_k3) to and from `ModelConfig`'s
fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kda_jax.config.model_config import ModelConfig

# Hugging Face's key (and transformers' second name for it) -> our field.
_SIZES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("vocab_size",), "vocab_size"),
    (("hidden_size",), "hidden_size"),
    (("intermediate_size",), "intermediate_size"),
    (("num_attention_heads",), "num_heads"),
    (("kv_lora_rank",), "kv_lora_rank"),
    (("qk_nope_head_dim",), "qk_nope_head_dim"),
    (("qk_rope_head_dim",), "qk_rope_head_dim"),
    (("v_head_dim",), "v_head_dim"),
)
_OPTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("model_max_length", "max_position_embeddings"), "model_max_length"),
    (("rms_norm_eps",), "rms_norm_eps"),
    (("latent_norm_eps",), "latent_norm_eps"),
    (("tie_word_embeddings",), "tie_embeddings"),
    (("q_lora_rank",), "q_lora_rank"),
    (("mla_use_output_gate",), "mla_output_gate"),
    (("num_experts", "num_local_experts"), "num_experts"),
    (("num_experts_per_token", "num_experts_per_tok"), "experts_per_token"),
    (("moe_intermediate_size",), "moe_intermediate_size"),
    (("num_shared_experts", "n_shared_experts"), "num_shared_experts"),
    (("num_expert_group", "n_group"), "num_expert_groups"),
    (("topk_group",), "topk_groups"),
    (("moe_renormalize", "norm_topk_prob"), "moe_renormalize"),
    (("routed_scaling_factor",), "routed_scaling_factor"),
    (("attn_res_block_size",), "attn_res_block_size"),
    (("routed_expert_hidden_size",), "routed_expert_hidden_size"),
    (("latent_moe_use_norm",), "latent_moe_norm"),
    (("bos_token_id",), "bos_token_id"),
    (("pad_token_id",), "pad_token_id"),
)
_LINEAR: tuple[tuple[str, str], ...] = (
    ("num_heads", "kda_num_heads"),
    ("head_dim", "kda_head_dim"),
    ("v_head_dim", "kda_v_head_dim"),
    ("num_v_heads", "kda_num_v_heads"),
    ("short_conv_kernel_size", "conv_size"),
    ("gate_lower_bound", "gate_lower_bound"),
    ("use_full_rank_gate", "full_rank_gate"),
)
_KIND_OF_HF = {"linear_attention": "kda", "full_attention": "mla"}
_HF_OF_KIND = {kind: name for name, kind in _KIND_OF_HF.items()}
_OF_THE_WHOLE = ("quantization_config", "media_placeholder_token_id")  # what K3 says beside its text_config
_K3_KEYS = ("attn_res_block_size", "routed_expert_hidden_size", "latent_moe_use_norm", "mla_use_output_gate")
# What these keys must hold when they are present: other values ask for arithmetic that no Kimi model has.
_FIXED: tuple[tuple[str, Any], ...] = (
    ("moe_router_activation_func", "sigmoid"),
    ("mla_use_nope", True),
    ("attention_bias", False),
    ("num_nextn_predict_layers", 0),
)


def fields_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the keyword arguments of `ModelConfig` from a Hugging Face config.

    Args:
        config: the parsed `config.json`.

    Raises:
        ValueError: if the model type is another, or a key is missing or holds what no Kimi model has.

    Source: Kimi-Linear-48B-A3B's config.json; transformers 5.24 `configuration_kimi_linear.py`.
    """
    kind = config.get("model_type")
    if kind == "kimi_k3" or (kind is None and "text_config" in config):
        text = dict(config.get("text_config") or {})
        for key in _OF_THE_WHOLE:
            text.setdefault(key, config.get(key))
    elif kind == "kimi_linear":
        text = dict(config)
    else:
        raise ValueError(f"config is of model_type {kind!r}; this library reads 'kimi_linear' and 'kimi_k3'")
    for key, wanted in _FIXED:
        if text.get(key, wanted) not in (wanted, None):
            raise ValueError(f"config has {key}={text[key]!r}; only {wanted!r} is supported")

    linear = text.get("linear_attn_config") or {}
    if not linear and "linear_num_heads" in text:
        linear = {"num_heads": text["linear_num_heads"], "head_dim": text["linear_head_dim"]}
        linear["short_conv_kernel_size"] = text.get("linear_conv_kernel_dim", 4)
    required = [keys[0] for keys, _ in _SIZES if text.get(keys[0]) is None]
    required += [f"linear_attn_config.{key}" for key in ("num_heads", "head_dim") if linear.get(key) is None]
    if text.get("num_hidden_layers") is None:
        required.append("num_hidden_layers")
    if required:
        raise ValueError(f"config lacks {', '.join(required)}")

    fields: dict[str, Any] = {"model_max_length": 1048576}
    for keys, field in _SIZES + _OPTIONS:
        for key in keys:
            if text.get(key) is not None:
                fields[field] = text[key]
                break
    fields |= {field: linear[key] for key, field in _LINEAR if linear.get(key) is not None}
    fields["layers"] = _attention_kinds(text, linear)
    fields["mlps"] = _mlp_kinds(text)
    fields |= _activation(text)
    fields["media_placeholder_token_id"] = text.get("media_placeholder_token_id")
    fields["quantization"] = _quantization(text.get("quantization_config"))
    eos = text.get("eos_token_id")
    fields["eos_token_id"] = tuple(eos) if isinstance(eos, list) else eos
    return fields


def _attention_kinds(text: Mapping[str, Any], linear: Mapping[str, Any]) -> tuple[str, ...]:
    count = text["num_hidden_layers"]
    if (names := text.get("layer_types")) is not None:
        if len(names) != count or set(names) - set(_KIND_OF_HF):
            raise ValueError(
                f"layer_types must name {count} layers out of {sorted(_KIND_OF_HF)}, got {names}"
            )
        return tuple(_KIND_OF_HF[name] for name in names)
    kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    if kda is None or full is None:
        raise ValueError(
            "config names its layers neither by layer_types nor by kda_layers and full_attn_layers"
        )
    if sorted([*kda, *full]) != list(range(1, count + 1)):
        raise ValueError(
            f"kda_layers {kda} and full_attn_layers {full} must together name layers 1..{count} once each"
        )
    return tuple("kda" if layer in set(kda) else "mla" for layer in range(1, count + 1))


def _mlp_kinds(text: Mapping[str, Any]) -> tuple[str, ...]:
    count = text["num_hidden_layers"]
    if (names := text.get("mlp_layer_types")) is not None:
        if len(names) != count or set(names) - {"dense", "sparse"}:
            raise ValueError(
                f"mlp_layer_types must name {count} layers out of ['dense', 'sparse'], got {names}"
            )
        return tuple("dense" if name == "dense" else "moe" for name in names)
    if not (text.get("num_experts") or text.get("num_local_experts")):
        return ("dense",) * count
    first, every = text.get("first_k_dense_replace", 1), text.get("moe_layer_freq", 1)
    return tuple("moe" if layer >= first and layer % every == 0 else "dense" for layer in range(count))


def _activation(text: Mapping[str, Any]) -> dict[str, Any]:
    name = text.get("hidden_act", "silu")
    if name == "silu":
        return {}
    if name != "situ":
        raise ValueError(f"config has hidden_act={name!r}; only 'silu' and 'situ' are supported")
    return {
        "situ_beta": text.get("activation_situ_beta", 4.0),
        "situ_linear_beta": text.get("activation_situ_linear_beta", 25.0),
    }


def _quantization(config: Mapping[str, Any] | None) -> str | None:
    if not config:
        return None
    if "mxfp4" in str(config.get("format", "")):
        return "mxfp4"
    raise ValueError(
        f"config has quantization_config of format {config.get('format')!r}; only mxfp4 is supported"
    )


def hf_from_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a `ModelConfig` as the `config.json` that transformers and `fields_from_hf` read.

    Fields that Hugging Face has no key for (a value head size of its own, grouped value heads, another latent
    norm eps) go under keys of ours, and only when they differ from what transformers assumes.
    """
    kinds = config.layers
    linear: dict[str, Any] = {
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "kda"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "mla"],
        "num_heads": config.kda_num_heads,
        "head_dim": config.kda_head_dim,
        "short_conv_kernel_size": config.conv_size,
    }
    if config.kda_value_dim != config.kda_head_dim:
        linear["v_head_dim"] = config.kda_value_dim
    if config.kda_value_heads != config.kda_num_heads:
        linear["num_v_heads"] = config.kda_value_heads
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
    if config.full_rank_gate:
        linear["use_full_rank_gate"] = True

    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": len(kinds),
        "num_key_value_heads": config.num_heads,
        "head_dim": config.qk_rope_head_dim,
        "hidden_act": "silu" if config.situ_beta is None else "situ",
        "layer_types": [_HF_OF_KIND[kind] for kind in kinds],
        "mlp_layer_types": ["dense" if kind == "dense" else "sparse" for kind in config.mlps],
        "first_k_dense_replace": config.mlps.index("moe") if "moe" in config.mlps else len(kinds),
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
    }
    text |= {keys[0]: getattr(config, field) for keys, field in _SIZES + _OPTIONS}
    if config.latent_norm_eps == 1e-6:
        del text["latent_norm_eps"]
    eos = config.eos_token_id
    text["eos_token_id"] = list(eos) if isinstance(eos, tuple) else eos
    is_k3 = bool(
        config.k3_parts or config.gate_lower_bound or config.full_rank_gate or config.mla_output_gate
    )
    if not is_k3:
        for key in _K3_KEYS:
            del text[key]
    if config.situ_beta is not None:
        text["activation_situ_beta"] = config.situ_beta
        text["activation_situ_linear_beta"] = config.situ_linear_beta
    if not is_k3:
        return text
    text["architectures"] = ["KimiK3ForCausalLM"]
    whole: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
    }
    if config.media_placeholder_token_id is not None:
        whole["media_placeholder_token_id"] = config.media_placeholder_token_id
    if config.quantization is not None:
        whole["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
        }
    return whole
