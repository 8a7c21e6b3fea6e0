"""Attention over latent rows shared by all heads."""

from pallas_kernels.mla_attention.api import mla_attention

__all__ = ["mla_attention"]
