"""Which (token, slot) pairs go to which expert: the order in which experts are worked through."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """Pairs (token, slot), numbered token * S + slot, in the order of their experts.

    Attributes:
        pair: [N*S] int32, the pair at each place; pairs of no expert stand last.
        place: [N, S] int32, the place of each pair.
        taken: [N, S] bool, whether the pair has an expert at all.
        first: [E] int32, the first place of each expert.
        count: [E] int32, the number of its pairs.
        used: [E] int32, the experts that have pairs, ascending, then the others.
        num_used: int32.
    """

    pair: jax.Array
    place: jax.Array
    taken: jax.Array
    first: jax.Array
    count: jax.Array
    used: jax.Array
    num_used: jax.Array


def route(expert_ids: jax.Array, num_experts: int) -> Routing:
    """Sorts the pairs of `expert_ids` [N, S] by expert, keeping token order inside one; ids outside 0..E-1 go last."""
    taken = (expert_ids >= 0) & (expert_ids < num_experts)
    expert = jnp.where(taken, expert_ids, num_experts).reshape(-1)
    pair = jnp.argsort(expert, stable=True).astype(jnp.int32)
    count = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    place = jnp.zeros_like(pair).at[pair].set(jnp.arange(pair.shape[0], dtype=jnp.int32), unique_indices=True)
    used = jnp.argsort(count == 0, stable=True).astype(jnp.int32)
    return Routing(
        pair=pair,
        place=place.reshape(expert_ids.shape),
        taken=taken,
        first=jnp.cumsum(count) - count,
        count=count,
        used=used,
        num_used=(count > 0).sum(dtype=jnp.int32),
    )
