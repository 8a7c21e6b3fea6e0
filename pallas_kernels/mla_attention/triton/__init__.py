"""Backend "triton": latent attention as Pallas kernels that the Triton lowering compiles for NVIDIA GPUs."""

from pallas_kernels.mla_attention.triton.forward import forward, refusal

__all__ = ["forward", "refusal"]
