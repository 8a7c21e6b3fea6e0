"""KDA states in a quarter of their bytes: int8 with one scale a head and key channel."""

from pallas_kernels.state_compression.api import compress_state, decompress_state
from pallas_kernels.state_compression.reference import CompressedState

__all__ = ["CompressedState", "compress_state", "decompress_state"]
