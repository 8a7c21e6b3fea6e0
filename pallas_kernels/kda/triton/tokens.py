"""The tokens of a chunk as a value head's kernel reads them: the L2 norm and the gate are taken on the way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.gate import NORM_EPS, log_decay
from pallas_kernels.kda.triton.tile import BLOCK, Columns, Plan, in_log2, own, read, rows_of


class Tokens:
    """A chunk of q, k [tokens, H * K] and g [tokens, HV * K], as one value head sees it.

    Rows are numbers in the chunk, one or [R]; those that are not its own read as zeros, which change nothing.

    Args:
        refs: q, k, g, and as far as there is a gate its A_log [HV] and dt_bias [HV * K].
        token, live: the chunk's first row, and how many rows from there are its own.
        head: the value head.
        plan: the call's.
    """

    def __init__(self, refs: Sequence[Any], token: jax.Array, live: jax.Array, head, plan: Plan) -> None:
        self.q_ref, self.k_ref, self.g_ref, *self.gate_refs = refs
        self.token, self.live, self.head, self.plan = token, live, head, plan
        self.key_head = head if plan.repeats == 1 else jax.lax.div(head, jnp.int32(plan.repeats))

    def queries(self, rows: jax.Array, s) -> jax.Array:
        """Slice s of the rows' queries, not yet divided by their norms, float32."""
        return self._read(self.q_ref, rows, self._channels(self.key_head, s))

    def keys(self, rows: jax.Array, s) -> jax.Array:
        """Slice s of the rows' keys, not yet divided by their norms, float32."""
        return self._read(self.k_ref, rows, self._channels(self.key_head, s))

    def log2_decays(self, rows: jax.Array, s) -> jax.Array:
        """Slice s of the rows' log decays in base 2, bounded below."""
        g = self._read(self.g_ref, rows, self._channels(self.head, s))
        return in_log2(jnp.where(own(rows, self.live), self._gate(g, s), 0.0) if self.plan.gated else g)

    def query_norms(self, block) -> jax.Array:
        """What a block's queries are to be multiplied by, [16]."""
        return self._norms(self.queries, block)

    def key_norms(self, block) -> jax.Array:
        """What a block's keys are to be multiplied by, [16]."""
        return self._norms(self.keys, block)

    def _norms(self, rows_at: Callable[..., jax.Array], block) -> jax.Array:
        if not self.plan.qk_l2norm:
            return jnp.ones((BLOCK,), jnp.float32)

        def add(s, squares):
            x = rows_at(rows_of(block), s)
            return squares + jnp.sum(x * x, axis=1)

        squares = jax.lax.fori_loop(0, self.plan.slices, add, jnp.zeros((BLOCK,), jnp.float32))
        return jax.lax.rsqrt(squares + NORM_EPS)

    def _gate(self, z: jax.Array, s) -> jax.Array:
        A_log_ref, *bias_ref = self.gate_refs
        if bias_ref:
            z = z + bias_ref[0][self._channels(self.head, s)].astype(jnp.float32)
        return log_decay(z, jnp.exp(A_log_ref[self.head].astype(jnp.float32)), self.plan.lower_bound)

    def _channels(self, head, s) -> Columns:
        return pl.ds(head * self.plan.keys + s * self.plan.key_slice, self.plan.key_slice)

    def _read(self, ref, rows: jax.Array, columns: Columns) -> jax.Array:
        return read(ref, self.token, self.live, rows, self.plan, columns)
