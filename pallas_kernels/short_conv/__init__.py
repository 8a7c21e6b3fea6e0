"""Short causal depthwise convolution with a carried window."""

from pallas_kernels.short_conv.api import short_conv, short_conv_step

__all__ = ["short_conv", "short_conv_step"]
