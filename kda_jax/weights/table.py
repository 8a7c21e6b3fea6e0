"""The table of tensors: which tensor of a Hugging Face checkpoint fills which parameter of `kda_jax.Model`.

A `Row` says: a tensor of this name and shape fills this parameter, or part of it, through this transform.
Everything else follows from the rows (see `names.py`): what to load, what to save, what is missing, and how
large a model is before it exists.

Rows that name the same parameter lie side by side in its outputs (the last axis; of packed experts, the last but one),
in the order of the table: `in_proj.kernel` of a KDA layer is `q | k | v | f_a | g_a | beta`.

Source: the headers of Kimi-Linear-48B-A3B's and Kimi K3's checkpoints; transformers 5.24
`conversion_mapping.py` (kimi_linear) for the fused names.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32_KIND = "f32"
BFLOAT16_KIND = "bf16"
PACKED_KIND = "mxfp4"  # uint8, two 4-bit values a byte
SCALE_KIND = "e8m0"  # uint8, one power of two for every 32 values
M = "block_sparse_moe."


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: the tensor's name in a checkpoint, below `model.layers.{i}.`; `{e}` stands for the expert.
        shape: its axes, names of `names.sizes`.
        paths: our parameters below `layers.{i}.`, in the order its transform yields them.
        transform: key of `transforms.TRANSFORMS`.
        when: key of `names.conditions`; the row stands only where it holds.
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
    Row("self_attention_res_norm.weight", "D", "attn_mix.norm", "same", "attn_res"),
    Row("self_attention_res_proj.weight", "1 D", "attn_mix.proj", "matrix", "attn_res"),
    Row("mlp_res_norm.weight", "D", "mlp_mix.norm", "same", "attn_res"),
    Row("mlp_res_proj.weight", "1 D", "mlp_mix.proj", "matrix", "attn_res"),
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
    Row(M + "routed_expert_down_proj.weight", "Z D", "mlp.latent_down.kernel", "matrix", "latent_experts"),
    Row(M + "routed_expert_norm.weight", "Z", "mlp.latent_norm", "same", "latent_norm"),
    Row(M + "routed_expert_up_proj.weight", "D Z", "mlp.latent_up.kernel", "matrix", "latent_experts"),
    Row(M + "shared_experts.gate_proj.weight", "Is D", "mlp.shared.gate_up.kernel", "matrix", "shared"),
    Row(M + "shared_experts.up_proj.weight", "Is D", "mlp.shared.gate_up.kernel", "matrix", "shared"),
    Row(M + "shared_experts.down_proj.weight", "D Is", "mlp.shared.down.kernel", "matrix", "shared"),
)
EXPERT = (
    Row(M + "experts.{e}.w1.weight", "I Z", "mlp.w_gate_up", "matrix", "plain_experts"),
    Row(M + "experts.{e}.w3.weight", "I Z", "mlp.w_gate_up", "matrix", "plain_experts"),
    Row(M + "experts.{e}.w2.weight", "Z I", "mlp.w_down", "matrix", "plain_experts"),
    Row(M + "experts.{e}.w1.weight_packed", "I Z/2", "mlp.w_gate_up.packed", "rows", "mxfp4", PACKED_KIND),
    Row(M + "experts.{e}.w1.weight_scale", "I Z/32", "mlp.w_gate_up.scale", "rows", "mxfp4", SCALE_KIND),
    Row(M + "experts.{e}.w3.weight_packed", "I Z/2", "mlp.w_gate_up.packed", "rows", "mxfp4", PACKED_KIND),
    Row(M + "experts.{e}.w3.weight_scale", "I Z/32", "mlp.w_gate_up.scale", "rows", "mxfp4", SCALE_KIND),
    Row(M + "experts.{e}.w2.weight_packed", "Z I/2", "mlp.w_down.packed", "rows", "mxfp4", PACKED_KIND),
    Row(M + "experts.{e}.w2.weight_scale", "Z I/32", "mlp.w_down.scale", "rows", "mxfp4", SCALE_KIND),
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
    Row("model.output_attn_res_norm.weight", "D", "mix.norm", "same", "attn_res"),
    Row("model.output_attn_res_proj.weight", "1 D", "mix.proj", "matrix", "attn_res"),
    Row("lm_head.weight", "vocab D", "lm_head.kernel", "matrix", "untied"),
)
