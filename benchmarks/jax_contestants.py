"""Contestants in JAX: ours, a token-by-token scan, tokamax and deltanet-tpu.

Each is called in its own layout, with arrays laid out for it before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contestant import Absent, Arrays, Run
from benchmarks.inputs import Case, Inputs

Operator = Callable[..., tuple[jax.Array, jax.Array]]


def unchanged(x: jax.Array) -> jax.Array:
    """The layout [B, T, H, *] is the contender's own."""
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxContestant:
    """An implementation in JAX.

    Attributes:
        name: its name in the report.
        package: the distribution it comes from.
        load: imports it and returns `case, inputs -> op(q, k, v, gate, beta, state) -> (out, state)`.
        rows_in, rows_out: [B, T, H, *] to its layout and back.
        state_in, state_out: [B, H, K, V] to its layout and back.
    """

    name: str
    package: str
    load: Callable[[], Callable[[Case, Inputs], Operator]]
    raw_gate: bool = False
    keeps_states: int = 0
    rows_in: Callable[[jax.Array], jax.Array] = unchanged
    rows_out: Callable[[jax.Array], jax.Array] = unchanged
    state_in: Callable[[jax.Array], jax.Array] = unchanged
    state_out: Callable[[jax.Array], jax.Array] = unchanged

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        operator = self.load()(case, inputs)
        gate = inputs.z if self.raw_gate else inputs.g
        rows = (self.rows_in(x) for x in (inputs.q, inputs.k, inputs.v, gate, inputs.beta))
        arguments = (*rows, self.state_in(inputs.state))
        out_weight, state_weight = self.rows_in(inputs.out_weight), self.state_in(inputs.state_weight)

        def loss(*args: jax.Array) -> jax.Array:
            out, state = operator(*args)
            return jnp.sum(out * out_weight) + jnp.sum(state * state_weight)

        forward = jax.jit(operator)
        both = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(6))))
        return Run(
            forward=lambda: jax.block_until_ready(forward(*arguments)),
            both=lambda: jax.block_until_ready(both(*arguments))[1],
            restore_forward=lambda arrays: self._restore(arrays[:1], arrays[1]),
            restore_both=lambda arrays: self._restore(arrays[:5], arrays[5]),
        )

    def _restore(self, rows: Arrays, state: jax.Array) -> tuple[np.ndarray, ...]:
        return (*(np.asarray(self.rows_out(x)) for x in rows), np.asarray(self.state_out(state)))


def load_ours(*, raw_gate: bool) -> Callable[[Case, Inputs], Operator]:
    """Our `kda_prefill`; with `raw_gate`, `kda_gate` before it, for contenders that fuse the two."""
    from pallas_kernels.kda import kda_gate, kda_prefill

    def build(case: Case, inputs: Inputs) -> Operator:
        def operator(q: Any, k: Any, v: Any, gate: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
            if raw_gate:
                gate = kda_gate(gate, inputs.A_log, inputs.dt_bias, lower_bound=case.lower_bound)
            out, state, *_ = kda_prefill(q, k, v, gate, beta, state, gate_lower_bound=case.lower_bound)
            return out, state

        return operator

    return build


def load_scan() -> Callable[[Case, Inputs], Operator]:
    """The recurrence as anybody writes it first: `lax.scan`, three einsums a token, gradients by autodiff."""

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = token
        state = state * jnp.exp(g)[..., None]
        error = v - jnp.einsum("bhk,bhkv->bhv", k, state)
        state = state + jnp.einsum("bhk,bhv->bhkv", beta[..., None] * k, error)
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    def operator(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q * q.shape[-1] ** -0.5, k, v, g, beta))
        state, out = jax.lax.scan(step, state, tokens)
        return jnp.moveaxis(out, 0, 1), state

    return lambda case, inputs: operator


def load_tokamax() -> Callable[[Case, Inputs], Operator]:
    """Tokamax' chunked form for any XLA device. It takes the raw gate, and only the bounded one."""
    try:
        from tokamax._src.ops.kda.api import kimi_delta_attention  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Absent(f"tokamax is not installed ({error})") from error

    def build(case: Case, inputs: Inputs) -> Operator:
        def operator(q: Any, k: Any, v: Any, gate: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
            return kimi_delta_attention(
                q, k, v, gate, beta,
                a_log=inputs.A_log, delta_time_bias=inputs.dt_bias.reshape(-1), lower_bound=case.lower_bound,
                use_gate_in_kernel=True, initial_state=state, output_final_state=True,
                implementation="xla_chunked",
            )  # fmt: skip

        return operator

    return build


def load_deltanet() -> Callable[[Case, Inputs], Operator]:
    """deltanet-tpu's pure-JAX form in float32: what it offers off a TPU, short of interpreting its kernel."""
    try:
        from deltanet_tpu import chunk_kda  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Absent(f"deltanet-tpu is not installed ({error})") from error

    def operator(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        out, state = chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            output_final_state=True,
            precision="fp32",
            fallback_scan=True,
        )
        return out, state

    return lambda case, inputs: operator
