"""Backend "triton": everything between a KDA layer's projections in one Pallas kernel for NVIDIA GPUs."""

from pallas_kernels.kda_decode.triton.call import decode, draft, refusal

__all__ = ["decode", "draft", "refusal"]
