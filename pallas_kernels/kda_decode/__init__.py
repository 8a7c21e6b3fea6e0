"""A KDA layer between its projections, a token at a time: convolution, gates, norms and recurrence as one operator."""

from pallas_kernels.kda_decode.api import kda_accept, kda_decode, kda_draft
from pallas_kernels.kda_decode.inputs import KDAParameters

__all__ = ["KDAParameters", "kda_accept", "kda_decode", "kda_draft"]
