"""The one table between the tensors of a Hugging Face checkpoint and the parameters of `kda_jax.Model`.

A `Row` says: a tensor of this name and shape fills this parameter, or part of it, through this transform.
Everything else follows from the rows: what to load, what to save, what is missing, and how large a model is
before it exists.

Rows that name the same parameter lie side by side in its last axis, in the order of the table:
`in_proj.kernel` of a KDA layer is `q | k | v | f_a | g_a | beta`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kda_jax.config import ModelConfig

FLOAT32_KIND = "f32"
BFLOAT16_KIND = "bf16"
PACKED_KIND = "mxfp4"  # uint8, two 4-bit values a byte
SCALE_KIND = "e8m0"  # uint8, one power of two for every 32 values

PREFIX_OF_MULTIMODAL = "language_model."
NOT_TEXT = ("vision_tower.", "mm_projector.")
MXFP4_BLOCK = 32
A_LOG_PADDING = 128
M = "block_sparse_moe."


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: the tensor's name in a checkpoint, below `model.layers.{i}.`; `{e}` stands for the expert.
        shape: its axes, names of `sizes`.
        paths: our parameters below `layers.{i}.`, in the order its transform yields them. Empty: no parameter
            of today's model takes it.
        transform: key of `kda_jax.weights.transforms.TRANSFORMS`.
        when: key of `_conditions`; the row stands only where it holds.
        kind: how released checkpoints store it.
    """

    name: str
    shape: str
    paths: str
    transform: str = "matrix"
    when: str = "always"
    kind: str = BFLOAT16_KIND


LAYER = (
    Row("input_layernorm.weight", "D", "input_norm", "same"),
    Row("post_attention_layernorm.weight", "D", "post_norm", "same"),
    Row("self_attention_res_norm.weight", "D", "", "same", "attn_res"),
    Row("self_attention_res_proj.weight", "1 D", "", "matrix", "attn_res"),
    Row("mlp_res_norm.weight", "D", "", "same", "attn_res"),
    Row("mlp_res_proj.weight", "1 D", "", "matrix", "attn_res"),
)
KDA = (
    Row("self_attn.q_proj.weight", "HK D", "attn.in_proj.kernel"),
    Row("self_attn.k_proj.weight", "HK D", "attn.in_proj.kernel"),
    Row("self_attn.v_proj.weight", "GV D", "attn.in_proj.kernel"),
    Row("self_attn.f_a_proj.weight", "K D", "attn.in_proj.kernel"),
    Row("self_attn.g_a_proj.weight", "K D", "attn.in_proj.kernel", "matrix", "low_rank_gate"),
    Row("self_attn.g_proj.weight", "GV D", "attn.in_proj.kernel", "matrix", "full_rank_gate"),
    Row("self_attn.b_proj.weight", "G D", "attn.in_proj.kernel"),
    Row("self_attn.q_conv1d.weight", "HK 1 W", "attn.conv", "conv"),
    Row("self_attn.k_conv1d.weight", "HK 1 W", "attn.conv", "conv"),
    Row("self_attn.v_conv1d.weight", "GV 1 W", "attn.conv", "conv"),
    Row("self_attn.f_b_proj.weight", "GK K", "attn.f_b.kernel"),
    Row("self_attn.g_b_proj.weight", "GV K", "attn.g_b.kernel", "matrix", "low_rank_gate"),
    Row("self_attn.A_log", "1 1 G 1", "attn.A_log", "heads", "plain_heads", FLOAT32_KIND),
    Row("self_attn.A_log", "Gpad", "attn.A_log", "heads", "padded_heads", FLOAT32_KIND),
    Row("self_attn.dt_bias", "GK", "attn.dt_bias", "head_channels", "always", FLOAT32_KIND),
    Row("self_attn.o_norm.weight", "V", "attn.o_norm", "same"),
    Row("self_attn.o_proj.weight", "D GV", "attn.o_proj.kernel"),
)
MLA = (
    Row("self_attn.q_proj.weight", "Hq D", "attn.in_proj.kernel", "matrix", "full_rank_query"),
    Row("self_attn.q_a_proj.weight", "Rq D", "attn.in_proj.kernel", "matrix", "low_rank_query"),
    Row("self_attn.kv_a_proj_with_mqa.weight", "RP D", "attn.in_proj.kernel"),
    Row("self_attn.g_proj.weight", "Hv D", "attn.in_proj.kernel", "matrix", "mla_gate"),
    Row("self_attn.q_a_layernorm.weight", "Rq", "attn.q_norm", "same", "low_rank_query"),
    Row("self_attn.q_b_proj.weight", "Hq Rq", "attn.q_b.kernel", "matrix", "low_rank_query"),
    Row("self_attn.kv_a_layernorm.weight", "R", "attn.kv_norm", "same"),
    Row("self_attn.kv_b_proj.weight", "Hkv R", "attn.w_uk attn.w_uv", "key_and_value_heads"),
    Row("self_attn.o_proj.weight", "D Hv", "attn.o_proj.kernel"),
)
DENSE = (
    Row("mlp.gate_proj.weight", "F D", "mlp.gate_up.kernel"),
    Row("mlp.up_proj.weight", "F D", "mlp.gate_up.kernel"),
    Row("mlp.down_proj.weight", "D F", "mlp.down.kernel"),
)
MOE = (
    Row(M + "gate.weight", "E D", "mlp.router.kernel"),
    Row(M + "gate.e_score_correction_bias", "E", "mlp.router.bias", kind=FLOAT32_KIND, transform="same"),
    Row(M + "routed_expert_down_proj.weight", "Z D", "", "matrix", "latent_experts"),
    Row(M + "routed_expert_norm.weight", "Z", "", "same", "latent_norm"),
    Row(M + "routed_expert_up_proj.weight", "D Z", "", "matrix", "latent_experts"),
    Row(M + "shared_experts.gate_proj.weight", "Is D", "mlp.shared.gate_up.kernel", "matrix", "shared"),
    Row(M + "shared_experts.up_proj.weight", "Is D", "mlp.shared.gate_up.kernel", "matrix", "shared"),
    Row(M + "shared_experts.down_proj.weight", "D Is", "mlp.shared.down.kernel", "matrix", "shared"),
)
EXPERT = (
    Row(M + "experts.{e}.w1.weight", "I Z", "mlp.w_gate_up", "matrix", "plain_experts"),
    Row(M + "experts.{e}.w3.weight", "I Z", "mlp.w_gate_up", "matrix", "plain_experts"),
    Row(M + "experts.{e}.w2.weight", "Z I", "mlp.w_down", "matrix", "plain_experts"),
    Row(M + "experts.{e}.w1.weight_packed", "I Z/2", "", "same", "mxfp4", PACKED_KIND),
    Row(M + "experts.{e}.w1.weight_scale", "I Z/32", "", "same", "mxfp4", SCALE_KIND),
    Row(M + "experts.{e}.w3.weight_packed", "I Z/2", "", "same", "mxfp4", PACKED_KIND),
    Row(M + "experts.{e}.w3.weight_scale", "I Z/32", "", "same", "mxfp4", SCALE_KIND),
    Row(M + "experts.{e}.w2.weight_packed", "Z I/2", "", "same", "mxfp4", PACKED_KIND),
    Row(M + "experts.{e}.w2.weight_scale", "Z I/32", "", "same", "mxfp4", SCALE_KIND),
)
# How transformers holds the same weights in memory, and writes them when told not to undo its own layout
# (`save_pretrained(save_original_format=False)`): such a row replaces all rows above that fill its parameter.
KDA_FUSED = (Row("self_attn.conv1d.weight", "C 1 W", "attn.conv", "conv"),)
MOE_FUSED = (
    Row(M + "experts.gate_up_proj", "E I2 Z", "mlp.w_gate_up", "stacked", "plain_experts"),
    Row(M + "experts.down_proj", "E Z I", "mlp.w_down", "stacked", "plain_experts"),
)
TOP = (
    Row("model.embed_tokens.weight", "vocab D", "embed", "same"),
    Row("model.norm.weight", "D", "norm", "same"),
    Row("model.output_attn_res_norm.weight", "D", "", "same", "attn_res"),
    Row("model.output_attn_res_proj.weight", "1 D", "", "matrix", "attn_res"),
    Row("lm_head.weight", "vocab D", "lm_head.kernel", "matrix", "untied"),
)


class Target(NamedTuple):
    """The part of one of our parameters that a tensor fills: `parameter[expert][..., start:stop]`."""

    path: str
    expert: int | None
    start: int
    stop: int | None


class Tensor(NamedTuple):
    """One tensor of a checkpoint of a given config, with the places it fills."""

    name: str
    shape: tuple[int, ...]
    kind: str
    transform: str
    targets: tuple[Target, ...]


def sizes(config: ModelConfig) -> dict[str, int]:
    """The axis names of the table, for one config (channels, heads, experts or taps)."""
    c = config
    heads, gate_heads = c.kda_num_heads, c.kda_value_heads
    key, value = c.kda_head_dim, c.kda_value_dim
    inner, latent = c.moe_intermediate_size, c.routed_expert_hidden_size or c.hidden_size
    return {
        **{"1": 1, "D": c.hidden_size, "F": c.intermediate_size, "vocab": c.vocab_size, "W": c.conv_size},
        **{"K": key, "V": value, "G": gate_heads, "Gpad": -(-gate_heads // A_LOG_PADDING) * A_LOG_PADDING},
        **{"HK": heads * key, "GK": gate_heads * key, "GV": gate_heads * value, "C": c.conv_channels},
        **{"R": c.kv_lora_rank, "RP": c.latent_size, "Rq": c.q_lora_rank or 0},
        "Hq": c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "Hkv": c.num_heads * (c.qk_nope_head_dim + c.v_head_dim),
        "Hv": c.num_heads * c.v_head_dim,
        **{"E": c.num_experts, "I": inner, "I2": 2 * inner, "Is": inner * c.num_shared_experts, "Z": latent},
        **{
            "I/2": inner // 2,
            "I/32": inner // MXFP4_BLOCK,
            "Z/2": latent // 2,
            "Z/32": latent // MXFP4_BLOCK,
        },
    }


def _conditions(config: ModelConfig) -> dict[str, bool]:
    k3 = is_multimodal(config)
    return {
        "always": True,
        "full_rank_gate": config.full_rank_gate,
        "low_rank_gate": not config.full_rank_gate,
        "padded_heads": k3,
        "plain_heads": not k3,
        "low_rank_query": config.q_lora_rank is not None,
        "full_rank_query": config.q_lora_rank is None,
        "mla_gate": config.mla_output_gate,
        "shared": config.num_shared_experts > 0,
        "attn_res": config.attn_res_block_size is not None,
        "latent_experts": config.routed_expert_hidden_size is not None,
        "latent_norm": config.routed_expert_hidden_size is not None and config.latent_moe_norm,
        "plain_experts": config.quantization is None,
        "mxfp4": config.quantization == "mxfp4",
        "untied": not config.tie_embeddings,
    }


def is_multimodal(config: ModelConfig) -> bool:
    """Whether its checkpoints are K3's: names under `language_model.`, `A_log` padded with zeros."""
    return config.to_hf()["model_type"] == "kimi_k3"


class _Axes(NamedTuple):
    size_of: dict[str, int]
    holds: dict[str, bool]

    @classmethod
    def of(cls, config: ModelConfig) -> _Axes:
        return cls(sizes(config), _conditions(config))


def _place(rows: tuple[Row, ...], axes: _Axes, layer: int | None = None) -> Iterator[Tensor]:
    scope, path_scope = ("", "") if layer is None else (f"model.layers.{layer}.", f"layers.{layer}.")
    filled: dict[str, int] = {}
    for row in rows:
        if not axes.holds[row.when]:
            continue
        shape = tuple(axes.size_of[axis] for axis in row.shape.split())
        targets = tuple(Target(path_scope + path, None, 0, None) for path in row.paths.split())
        if row.transform in ("matrix", "conv") and targets:
            start = filled.get(row.paths, 0)
            stop = filled[row.paths] = start + shape[0]
            targets = (targets[0]._replace(start=start, stop=stop),)
        yield Tensor(scope + row.name, shape, row.kind, row.transform, targets)


def _layer_rows(config: ModelConfig, layer: int) -> tuple[Row, ...]:
    kinds = LAYER + (KDA if config.layers[layer] == "kda" else MLA)
    return kinds + (DENSE if config.mlps[layer] == "dense" else MOE)


def _for_expert(tensor: Tensor, expert: int) -> Tensor:
    targets = tuple(target._replace(expert=expert) for target in tensor.targets)
    return tensor._replace(name=tensor.name.replace("{e}", str(expert)), targets=targets)


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of this config, in the order of the layers.

    Yields:
        Tensors under the names of the released checkpoints, without the `language_model.` prefix.
    """
    axes = _Axes.of(config)
    yield from _place(TOP, axes)
    for layer, mlp in enumerate(config.mlps):
        yield from _place(_layer_rows(config, layer), axes, layer)
        of_expert = list(_place(EXPERT, axes, layer))
        for expert in range(config.num_experts if mlp == "moe" else 0):
            yield from (_for_expert(tensor, expert) for tensor in of_expert)


def fused_tensors(config: ModelConfig) -> Iterator[Tensor]:
    """The tensors that may stand in for several of `tensors`: transformers' own layout in memory."""
    axes = _Axes.of(config)
    for layer, (kind, mlp) in enumerate(zip(config.layers, config.mlps)):
        rows = (KDA_FUSED if kind == "kda" else ()) + (MOE_FUSED if mlp == "moe" else ())
        yield from _place(rows, axes, layer)


def hf_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, kind) of every tensor of a released text checkpoint; nothing is allocated.

    Works for configs that `Model` cannot build yet.

    Returns:
        Kinds are "bf16", "f32", "mxfp4" (packed experts: uint8, two values a byte) and "e8m0" (their scales).
    """
    axes = _Axes.of(config)
    prefix = PREFIX_OF_MULTIMODAL if is_multimodal(config) else ""
    shapes = {prefix + tensor.name: (tensor.shape, tensor.kind) for tensor in _place(TOP, axes)}
    for layer, mlp in enumerate(config.mlps):
        for tensor in _place(_layer_rows(config, layer), axes, layer):
            shapes[prefix + tensor.name] = (tensor.shape, tensor.kind)
        for tensor in _place(EXPERT, axes, layer):
            before, _, after = (prefix + tensor.name).partition("{e}")
            row = (tensor.shape, tensor.kind)
            for expert in range(config.num_experts if mlp == "moe" else 0):
                shapes[f"{before}{expert}{after}"] = row
    return shapes


_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(mlp|block_sparse_moe)\.")


def canonical(name: str, config: ModelConfig) -> str | None:
    """The table's name of a tensor that a file calls `name`; None for tensors of the vision tower.

    Undoes what writers do differently: the `language_model.` prefix of K3; `mlp` against `block_sparse_moe`
    (transformers writes dense layers under the second, and holds both kinds under the first); and
    `self_attn.forget_gate.*`, its own module for the gate.
    """
    if name.startswith(NOT_TEXT):
        return None
    name = name.removeprefix(PREFIX_OF_MULTIMODAL).replace(".self_attn.forget_gate.", ".self_attn.")
    match = _LAYER_NAME.match(name)
    if match and int(match[1]) < len(config.mlps):
        branch = "mlp" if config.mlps[int(match[1])] == "dense" else "block_sparse_moe"
        name = f"model.layers.{match[1]}.{branch}.{name[match.end() :]}"
    return name


def parameters_and_nbytes(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[int, int]:
    """Counts the parameters and the stored bytes of some tensors of `hf_shapes`; scales are bytes only."""
    parameters = nbytes = 0
    for shape, kind in shapes.values():
        count = math.prod(shape)
        parameters += count * {PACKED_KIND: 2, SCALE_KIND: 0}.get(kind, 1)
        nbytes += count * {FLOAT32_KIND: 4, BFLOAT16_KIND: 2}.get(kind, 1)
    return parameters, nbytes
