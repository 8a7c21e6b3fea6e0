"""Backend "triton": KDA as Pallas kernels that the Triton lowering compiles for NVIDIA GPUs."""

from pallas_kernels.kda.triton.prefill import prefill, refusal
from pallas_kernels.kda.triton.step import step

__all__ = ["prefill", "refusal", "step"]
