"""Kimi Delta Attention as a layer: linear attention with a channel-wise decay and a state of fixed size."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kda_jax.layers.projection import Linear, Projections, fan_in
from kda_jax.state import DraftedKDAState, KDAState, SlottedKDAState
from pallas_kernels import (
    KDAParameters,
    kda_decode,
    kda_draft,
    kda_gate,
    kda_prefill,
    rms_norm_gated,
    short_conv,
)


class KimiDeltaAttention(nnx.Module):
    """Kimi Delta Attention (KDA).

    Kernels are [in, out]. `in_proj` holds, side by side, q | k | v | decay gate (low rank) | output gate (low
    rank, or whole with `full_rank_gate`) | beta; `conv` is [W, q|k|v], its last tap for the current token.

    Args:
        hidden_size: width of input and output (D).
        num_heads: query and key heads (H).
        head_dim: channels of a query or key head (K), also the rank of both gates.
        v_head_dim: channels of a value head (V); K when None.
        num_v_heads: value heads (HV), a multiple of H; H when None. Value head i reads query head i // (HV /
            H).
        conv_size: taps of the short convolution (W), counting the current token.
        gate_lower_bound: None for the decay exp(-exp(A) softplus(z)) of Kimi Linear, or a negative number for
            the bounded exp(bound * sigmoid(exp(A) z)) of Kimi K3 (-5.0).
        full_rank_gate: a whole matrix for the output gate instead of one of rank K.
        norm_eps: of the output's RMS norm.
        rngs: `params` is drawn from.
        dtype: of the kernels; `A_log` and `dt_bias` are float32 always.

    Source: Kimi Linear, arXiv:2510.26692, section 4; transformers 5.24 `KimiLinearDeltaAttention`;
        initialisation as in fla 0.4 `layers/kda.py`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        num_v_heads: int | None = None,
        conv_size: int = 4,
        gate_lower_bound: float | None = None,
        full_rank_gate: bool = False,
        norm_eps: float = 1e-5,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ):
        values, value_heads = v_head_dim or head_dim, num_v_heads or num_heads
        if value_heads % num_heads:
            raise ValueError(f"num_v_heads={value_heads} must be a multiple of {num_heads=}")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_v_heads, self.v_head_dim = value_heads, values
        self.conv_size, self.gate_lower_bound, self.norm_eps = conv_size, gate_lower_bound, norm_eps

        keys, outputs = num_heads * head_dim, value_heads * values
        gate_width = outputs if full_rank_gate else head_dim
        sizes = (2 * keys + outputs, head_dim, gate_width, value_heads)
        self.in_proj = Projections(hidden_size, sizes, rngs=rngs, dtype=dtype)
        self.conv = fan_in(rngs, (conv_size, 2 * keys + outputs), dtype)
        self.f_b = Linear(head_dim, value_heads * head_dim, rngs=rngs, dtype=dtype)
        self.A_log, self.dt_bias = _gate_parameters(value_heads, head_dim, gate_lower_bound is not None, rngs)
        self.g_b = None if full_rank_gate else Linear(head_dim, outputs, rngs=rngs, dtype=dtype)
        self.o_norm = nnx.Param(jnp.ones((values,), dtype))
        self.o_proj = Linear(outputs, hidden_size, rngs=rngs, dtype=dtype)

    def empty(self, batch: int, dtype: DTypeLike | None = None) -> KDAState:
        """The state before the first token; `dtype` is the window's, the kernels' own when None."""
        dtype = self.conv[...].dtype if dtype is None else dtype
        recurrent = (batch, self.num_v_heads, self.head_dim, self.v_head_dim)
        return KDAState(
            jnp.zeros(recurrent, jnp.float32),
            jnp.zeros((batch, self.conv_size - 1, self.in_proj.sizes[0]), dtype),
            jnp.zeros((batch,), jnp.int32),
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: KDAState | SlottedKDAState | None = None,
        *,
        lengths: Int[Array, "B"] | None = None,
        boundaries: Int[Array, "... NB"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KDAState | SlottedKDAState | DraftedKDAState, *tuple[KDAState, ...]]:
        """Mixes tokens, going on from `state`.

        Args:
            x: the tokens' vectors.
            state: what the rows have absorbed; None for nothing. It also anchors the chunk grid. In slots for
                one token a row, or for drafts: those behind a row's length are kept too, and are not to be accepted.
            lengths: tokens of each row that count; the rest is padding, which touches nothing.
            boundaries: token counts of this call, 0..T, at which the state is returned too.

        Returns:
            y, the state behind each row's last token, and with `boundaries` the states there, [B, NB, ...]. Of drafts
            the states after each of them.

        Raises:
            ValueError: a state in slots and boundaries, or lengths of single tokens.
        """
        mixed, decay, gate, beta = self.in_proj(x)
        # The few columns of the gates are copied, or they would keep the whole projection alive.
        decay, gate, beta = jax.lax.optimization_barrier((decay, gate, beta))
        decay = self.f_b(decay).reshape(*x.shape[:2], self.num_v_heads, self.head_dim)
        if state is not None and x.shape[1] == 1 and lengths is None and boundaries is None:
            out, new, at = self._step(mixed, decay, beta, self._gate(gate), state)
        elif isinstance(state, SlottedKDAState):
            if x.shape[1] == 1 or boundaries is not None:
                raise ValueError(
                    f"states in slots take one token a row without lengths, or drafts, and no boundaries; got "
                    f"{x.shape[1]} tokens: take the rows out of their slots first"
                )
            out, new, at = self._drafts(mixed, decay, beta, self._gate(gate), state)
        else:
            decay = kda_gate(decay, self.A_log[...], self.dt_bias[...], lower_bound=self.gate_lower_bound)
            beta = jax.nn.sigmoid(beta.astype(jnp.float32))
            out, new, at = self._sequence(mixed, decay, beta, state, lengths, boundaries)
            out = rms_norm_gated(out, self._gate(gate), self.o_norm[...], eps=self.norm_eps)
        y = self.o_proj(out.reshape(*x.shape[:2], -1))
        return (y, new) if at is None else (y, new, at)

    def _parts(self, mixed: Float[Array, "*rows C"]) -> list[Array]:
        """The columns of queries, keys and values."""
        keys = self.num_heads * self.head_dim
        return jnp.split(mixed, (keys, 2 * keys), axis=-1)

    def _heads(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        rows = q.shape[:-1]
        q, k = (x.reshape(*rows, self.num_heads, self.head_dim) for x in (q, k))
        return q, k, v.reshape(*rows, self.num_v_heads, self.v_head_dim)

    def _gate(self, gate: Float[Array, "B T G"]) -> Float[Array, "B T HV V"]:
        """The output gate before its sigmoid."""
        gate = gate if self.g_b is None else self.g_b(gate)
        return gate.reshape(*gate.shape[:2], self.num_v_heads, self.v_head_dim)

    def _step(
        self, mixed: Array, decay: Array, beta: Array, gate: Array, state: KDAState | SlottedKDAState
    ) -> tuple[Array, KDAState | SlottedKDAState, None]:
        out, recurrent, window = kda_decode(
            mixed[:, 0],
            decay[:, 0],
            beta[:, 0],
            gate[:, 0],
            self._parameters(),
            state.recurrent,
            state.conv,
            eps=self.norm_eps,
            lower_bound=self.gate_lower_bound,
            slots=state.slots if isinstance(state, SlottedKDAState) else None,
        )
        new = state._replace(recurrent=recurrent, conv=window, position=state.position + 1)
        return out[:, None], new, None

    def _drafts(
        self, mixed: Array, decay: Array, beta: Array, gate: Array, state: SlottedKDAState
    ) -> tuple[Array, DraftedKDAState, None]:
        out, recurrent, windows = kda_draft(
            mixed,
            decay,
            beta,
            gate,
            self._parameters(),
            state.recurrent,
            state.conv,
            eps=self.norm_eps,
            lower_bound=self.gate_lower_bound,
            slots=state.slots,
        )
        return out, DraftedKDAState(recurrent, windows, state.position), None

    def _parameters(self) -> KDAParameters:
        return KDAParameters(self.conv[...], self.A_log[...], self.dt_bias[...], self.o_norm[...])

    def _sequence(
        self,
        mixed: Array,
        decay: Array,
        beta: Array,
        state: KDAState | None,
        lengths: Array | None,
        boundaries: Array | None,
    ) -> tuple[Array, KDAState, KDAState | None]:
        rows, tokens = mixed.shape[:2]
        window, recurrent, start = (
            (None,) * 3 if state is None else (state.conv, state.recurrent, state.position)
        )
        # Queries, keys and values one after the other: XLA keeps what each was made of until it is done.
        befores = [None] * 3 if window is None else self._parts(window)
        parts = [
            short_conv(x, weight, before, lengths=lengths, boundaries=boundaries)
            for x, weight, before in zip(self._parts(mixed), self._parts(self.conv[...]), befores)
        ]
        heads, *joined = zip(*parts, strict=True)
        window, *windows = (jnp.concatenate(x, axis=-1) for x in joined)
        out, recurrent, *recurrents = kda_prefill(
            *self._heads(*heads),
            decay,
            beta,
            recurrent,
            qk_l2norm=True,
            start=start,
            lengths=lengths,
            boundaries=boundaries,
            gate_lower_bound=self.gate_lower_bound,
        )
        start = jnp.zeros((rows,), jnp.int32) if start is None else start
        new = KDAState(recurrent, window, start + (tokens if lengths is None else lengths))
        if boundaries is None:
            return out, new, None
        counts = jnp.broadcast_to(boundaries, (rows, boundaries.shape[-1]))
        return out, new, KDAState(recurrents[0], windows[0], start[:, None] + counts)


def _gate_parameters(heads: int, channels: int, bounded: bool, rngs: nnx.Rngs) -> tuple[nnx.Param, nnx.Param]:
    """exp(A) ~ U(1, 16), or 1 for the bounded gate; softplus(dt_bias) ~ log-uniform in 1e-3..1e-1."""
    rates = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)
    low, high = jnp.log(jnp.float32(1e-3)), jnp.log(jnp.float32(1e-1))
    step = jnp.exp(jax.random.uniform(rngs.params(), (heads, channels), jnp.float32, low, high))
    A_log = jnp.zeros_like(rates) if bounded else jnp.log(rates)
    return nnx.Param(A_log), nnx.Param(step + jnp.log(-jnp.expm1(-step)))
