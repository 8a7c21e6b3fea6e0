"""Both attention layers inside a Flax Linen module, by Flax's own bridge.

    python examples/linen_bridge.py

The parameters become Linen's: `init` makes them, `apply` takes them, and a gradient has their tree. What the layers
remember stays a value: it goes in as an argument and comes out as a result, and is no collection of variables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from flax.nnx import bridge

from kda_jax import KDAState, KimiDeltaAttention, MLAState, MultiHeadLatentAttention

States = tuple[KDAState, MLAState]


class Block(linen.Module):
    """A KDA layer and an MLA layer, each with a residual, on vectors of `width` channels."""

    width: int

    def setup(self) -> None:
        self.kda = bridge.to_linen(KimiDeltaAttention, self.width, 2, 16)
        sizes: dict[str, Any] = dict(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
        self.mla = bridge.to_linen(MultiHeadLatentAttention, self.width, 2, **sizes)

    def __call__(self, x: jax.Array, states: States) -> tuple[jax.Array, States]:
        """x [B, T, D], going on from `states` -> y [B, T, D], and the states behind it."""
        y, kda = self.kda(x, states[0])
        x = x + y
        y, mla = self.mla(x, states[1])
        return x + y, (kda, mla)

    def empty(self, batch: int, capacity: int) -> States:
        """The states before the first token, with room for `capacity` tokens a row."""
        return self.kda.empty(batch), self.mla.empty(batch, capacity)


class Comparison(NamedTuple):
    """The largest differences of two calls from one, in the outputs and in the states behind them, and the largest
    entry of the gradient of each parameter, by its path."""

    outputs_differ: float
    states_differ: float
    gradient: dict[str, float]


def compare(*, seed: int = 0, tokens: int = 80) -> Comparison:
    """Reads random vectors in one call, then half by half, handing the states on; takes a gradient of the second half.

    Args:
        seed: decides the parameters and the vectors.
        tokens: vectors in a row, an even number.
    """
    block, half = Block(width=32), tokens // 2
    for_params, for_x = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(for_x, (2, tokens, block.width), jnp.float32)
    # The parameters' shapes depend on no input, so the cheapest method will do to make them.
    start, variables = block.init_with_output(for_params, *x.shape[:2], method=Block.empty)
    # The bridge makes the layers anew in each call, with first weights of their own: compiled, it makes none.
    apply = jax.jit(block.apply)

    whole, end = apply(variables, x, start)
    first, middle = apply(variables, x[:, :half], start)
    second, last = apply(variables, x[:, half:], middle)

    def loss(variables: Any) -> jax.Array:
        y, _ = block.apply(variables, x[:, half:], middle)
        return jnp.square(y).mean()

    gradient = jax.jit(jax.grad(loss))(variables)
    return Comparison(
        _largest(whole - jnp.concatenate((first, second), axis=1)),
        max(_largest(one - two) for one, two in zip(jax.tree.leaves(end), jax.tree.leaves(last))),
        {
            jax.tree_util.keystr(path, simple=True, separator="."): _largest(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(gradient["params"])
        },
    )


def _largest(x: jax.Array) -> float:
    return float(jnp.abs(x).max())


def main() -> None:
    """Prints what `compare` finds."""
    found = compare()
    print(f"{len(found.gradient)} parameters in Linen's tree: {', '.join(found.gradient)}")
    print(
        f"two calls differ from one by at most {found.outputs_differ:.1e} (states: {found.states_differ:.1e})"
    )
    print(
        f"gradients: largest entries from {min(found.gradient.values()):.1e} to {max(found.gradient.values()):.1e}"
    )


if __name__ == "__main__":
    main()
