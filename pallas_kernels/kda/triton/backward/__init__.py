"""The backward pass of KDA as Pallas kernels for NVIDIA GPUs: what the gradients need of the forward, and they."""

from pallas_kernels.kda.triton.backward.gradient import backward

__all__ = ["backward"]
