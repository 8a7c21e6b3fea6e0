"""Matrix products with a kernel: one output, or several outputs of one input side by side in one kernel."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.precision import rows_matmul


def fan_in(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, size: int | None = None) -> nnx.Param:
    """A normal kernel with variance 1 / fan-in; `size` is the fan-in when it is not `shape[-2]`."""
    std = (shape[-2] if size is None else size) ** -0.5
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype))


def rows_product(x: Float[Array, "*rows D"], kernel: Float[Array, "D F"]) -> Float[Array, "*rows F"]:
    """x @ kernel with all rows in one axis: the kernel's gradient is then a plain product, which XLA takes at twice the
    rate of one contracted over two axes (25 against 50 GFLOP/s a core, JAX 0.10.2)."""
    y = rows_matmul(x.reshape(-1, x.shape[-1]), kernel, precision=None).astype(x.dtype)
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nnx.Module):
    """x @ kernel, without a bias."""

    def __init__(self, in_size: int, out_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.kernel = fan_in(rngs, (in_size, out_size), dtype)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows F"]:
        return rows_product(x, self.kernel[...])


class Projections(nnx.Module):
    """Several projections of one input. Their kernels stand side by side in one, `[D, sum(sizes)]`.

    A decode step is bound by reading weights, and one long product reads them faster than several short ones.
    """

    def __init__(
        self, in_size: int, sizes: tuple[int, ...], *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
    ):
        self.sizes = sizes
        self.kernel = fan_in(rngs, (in_size, sum(sizes)), dtype)

    def __call__(self, x: Float[Array, "*rows D"]) -> tuple[Float[Array, "*rows _"], ...]:
        """One output a size, in the order of `sizes`."""
        y = rows_product(x, self.kernel[...])
        parts, at = [], 0
        for size in self.sizes:
            parts.append(jax.lax.slice_in_dim(y, at, at + size, axis=-1))
            at += size
        return tuple(parts)
