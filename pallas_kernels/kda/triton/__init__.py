"""Backend "triton": KDA as Pallas kernels that the Triton lowering compiles for NVIDIA GPUs."""

from pallas_kernels.kda.triton.backward import backward
from pallas_kernels.kda.triton.prefill import forward, fused
from pallas_kernels.kda.triton.step import step

__all__ = ["backward", "forward", "fused", "step"]
