"""Kimi Delta Attention: a linear attention whose state forgets by channel and learns by the delta rule."""

from pallas_kernels.kda.api import kda_prefill, kda_step
from pallas_kernels.kda.gate import Gate, kda_gate, l2_normalize

__all__ = ["Gate", "kda_gate", "kda_prefill", "kda_step", "l2_normalize"]
