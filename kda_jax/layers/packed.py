"""Matrices of a layer that stay in MXFP4."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import Mxfp4
from pallas_kernels.mxfp4 import BLOCK

_RMS_OF_CODES = 2.926  # of MXFP4's sixteen values


class Packed(nnx.Variable):
    """A parameter that no gradient reaches: bytes. `nnx.Param` selects all others."""


class PackedMatrices(nnx.Module):
    """One matrix an expert, [E, out, in], packed along its inputs: `packed` uint8 [E, out, in/2], `scale` uint8
    [E, out, in/32]. Experts come first, so that some of them are a slice.

    Args:
        num_experts, out_size, in_size: the shape.
        rngs: `params` is drawn from, with variance about 1 / in_size.
    """

    def __init__(self, num_experts: int, out_size: int, in_size: int, *, rngs: nnx.Rngs):
        rows = (num_experts, out_size)
        power = 127 + round(math.log2(in_size**-0.5 / _RMS_OF_CODES))
        self.packed = Packed(jax.random.bits(rngs.params(), (*rows, in_size // 2), jnp.uint8))
        self.scale = Packed(jnp.full((*rows, in_size // BLOCK), power, jnp.uint8))

    def __call__(self) -> Mxfp4:
        """The matrices as `expert_mlp` takes them."""
        return Mxfp4(self.packed[...], self.scale[...])
