"""What lies between the layers: a running sum, or attention over the sums of blocks of layers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kda_jax.layers.projection import fan_in
from pallas_kernels.fixed_order import row_dot, sum_of_squares
from pallas_kernels.precision import accumulator


class Residuals(NamedTuple):
    """What the layers so far have added up, token by token.

    Attributes:
        sum: of the block of layers that is open.
        blocks: the sums of the E blocks that are closed, the first (the embedding) first; None while there is none. A
            model whose residuals are one running sum closes none.
    """

    sum: Float[Array, "B T D"]
    blocks: Float[Array, "E B T D"] | None = None

    def add(self, y: Float[Array, "B T D"]) -> Residuals:
        """With y in the open block's sum."""
        return self._replace(sum=self.sum + y)

    def close(self, y: Float[Array, "B T D"]) -> Residuals:
        """With the open block closed, and y as all of the next one."""
        closed = self.sum[None]
        return Residuals(y, closed if self.blocks is None else jnp.concatenate((self.blocks, closed)))


class ResidualMix(nnx.Module):
    """What a layer reads: a mean over the blocks' sums, each token weighing its own ones by their content (AttnRes).

    With V_e the sums, s_e = norm(V_e) . proj and p = softmax(s), it is sum_e p_e V_e. Nothing is read from other
    tokens, so nothing is to be kept from call to call.

    Args:
        hidden_size: width (D).
        eps: of the RMS norm.
        rngs: `params` is drawn from.
        dtype: of the parameters; scores and sums are taken in float32.

    Source: attention residuals as in Kimi K3's checkpoint (`*_res_norm`, `*_res_proj`).
    """

    def __init__(self, hidden_size: int, *, eps: float, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.eps = eps
        self.norm = nnx.Param(jnp.ones((hidden_size,), dtype))
        self.proj = fan_in(rngs, (hidden_size, 1), dtype)

    def __call__(self, x: Residuals) -> Float[Array, "B T D"]:
        """Mixes all blocks; the open one alone is itself."""
        if x.blocks is None:
            return x.sum
        wide = accumulator(x.sum.dtype)
        key = self.norm[...].astype(wide) * self.proj[...][:, 0].astype(wide)
        blocks, open_sum = x.blocks.astype(wide), x.sum.astype(wide)
        # All closed blocks at once: one chain of additions in the program instead of one a block.
        weights = _softmax([*jnp.unstack(self._scores(blocks, key)), self._scores(open_sum, key)])
        values = [*jnp.unstack(blocks), open_sum]
        return _in_order([p * value for p, value in zip(weights, values)]).astype(x.sum.dtype)

    def _scores(self, values: Float[Array, "*rows D"], key: Float[Array, "D"]) -> Float[Array, "*rows 1"]:
        scale = jax.lax.rsqrt(sum_of_squares(values) / values.shape[-1] + self.eps)
        return row_dot(values, jnp.broadcast_to(key, values.shape)) * scale


def _softmax(scores: list[Float[Array, "B T 1"]]) -> list[Float[Array, "B T 1"]]:
    top = functools.reduce(jnp.maximum, scores)
    parts = [jnp.exp(score - top) for score in scores]
    total = _in_order(parts)
    return [part / total for part in parts]


def _in_order(terms: list[Float[Array, "B T _"]]) -> Float[Array, "B T _"]:
    """Their sum, one after the other: XLA orders a reduction by the program it stands in."""
    return functools.reduce(jnp.add, terms)
