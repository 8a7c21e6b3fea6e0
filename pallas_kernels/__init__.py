"""Operators of hybrid linear-attention models: arrays in, arrays out, one public function an operator."""

from pallas_kernels.expert_mlp import Activation, SituGlu, expert_mlp, swiglu
from pallas_kernels.kda import Gate, kda_gate, kda_prefill, kda_step, l2_normalize
from pallas_kernels.kda_decode import KDAParameters, kda_accept, kda_decode, kda_draft
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.mxfp4 import Mxfp4, unpack_mxfp4
from pallas_kernels.rms_norm import rms_norm, rms_norm_gated
from pallas_kernels.short_conv import short_conv, short_conv_step
from pallas_kernels.state_compression import CompressedState, compress_state, decompress_state

__all__ = [
    "Activation",
    "CompressedState",
    "Gate",
    "KDAParameters",
    "Mxfp4",
    "SituGlu",
    "compress_state",
    "decompress_state",
    "expert_mlp",
    "kda_accept",
    "kda_decode",
    "kda_draft",
    "kda_gate",
    "kda_prefill",
    "kda_step",
    "l2_normalize",
    "mla_attention",
    "rms_norm",
    "rms_norm_gated",
    "short_conv",
    "short_conv_step",
    "swiglu",
    "unpack_mxfp4",
]
