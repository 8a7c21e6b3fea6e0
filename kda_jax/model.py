"""The whole model: embedding, layers of attention and feed-forward, and the head."""

from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kda_jax.config import ModelConfig
from kda_jax.layers import (
    KimiDeltaAttention,
    Linear,
    Mlp,
    MultiHeadLatentAttention,
    ResidualMix,
    Residuals,
    SparseMoE,
    activation_of,
)
from kda_jax.layers.projection import fan_in
from kda_jax.state import (
    DraftedKDAState,
    KDAState,
    MLAState,
    ModelState,
    PagedMLAState,
    PooledState,
    SlottedKDAState,
)
from pallas_kernels import rms_norm
from pallas_kernels.fixed_order import MIN_ROWS
from pallas_kernels.precision import rows_matmul

LayerState = KDAState | MLAState | SlottedKDAState | DraftedKDAState | PagedMLAState
State = TypeVar("State", ModelState, PooledState)


class Block(nnx.Module):
    """One layer: x += attn(norm(x)), then x += mlp(norm(x)).

    With `attn_res_block_size` either half reads a mix of the residuals of all blocks of that many layers, and the first
    layer of a block opens it: what was added up until then is closed, and attention's output is all of the new sum.
    """

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.eps = config.rms_norm_eps
        size = config.attn_res_block_size
        self.opens_block = size is not None and layer % size == 0
        self.input_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.attn = _attention(config, layer, rngs, dtype)
        self.post_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        if config.mlps[layer] == "dense":
            activation, sizes = activation_of(config), (config.hidden_size, config.intermediate_size)
            self.mlp = Mlp(*sizes, activation=activation, rngs=rngs, dtype=dtype)
        else:
            self.mlp = SparseMoE(config, rngs=rngs, dtype=dtype)
        self.attn_mix, self.mlp_mix = (_mix(config, rngs, dtype) for _ in range(2))

    def __call__(
        self,
        x: Residuals,
        state: LayerState | None = None,
        *,
        lengths: Int[Array, "B"] | None = None,
        boundaries: Int[Array, "... NB"] | None = None,
    ) -> tuple[Residuals, LayerState, *tuple[LayerState, ...]]:
        """As the attention layers: y, the state behind, and with `boundaries` the states there."""
        normal = rms_norm(_read(x, self.attn_mix), self.input_norm[...], eps=self.eps)
        y, new, *at = self.attn(
            normal,
            state,  # pyright: ignore[reportArgumentType]  # each layer gets the kind of state that it makes
            lengths=lengths,
            boundaries=boundaries,
        )
        x = x.close(y) if self.opens_block else x.add(y)
        normal = rms_norm(_read(x, self.mlp_mix), self.post_norm[...], eps=self.eps)
        if isinstance(self.mlp, SparseMoE):
            return (x.add(self.mlp(normal, _live(normal, lengths))), new, *at)
        return (x.add(self.mlp(normal)), new, *at)


class Model(nnx.Module):
    """A Kimi Linear or Kimi K3 language model: the config says of which parts.

    Parameters lie under `embed` [V, D], `layers.{i}`, `norm` [D] and `lm_head.kernel` [D, V] (absent when
    tied); with attention over residual blocks also under `mix`.

    Args:
        config: sizes and options.
        rngs: `params` is drawn from. To build from shapes alone, call this inside `nnx.eval_shape`.
        dtype: of parameters and activations; the router, `A_log`, `dt_bias` and all recurrent states are
            float32, MXFP4 experts are uint8.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        width = config.hidden_size if config.tie_embeddings else 1
        self.embed = fan_in(rngs, (config.vocab_size, config.hidden_size), dtype, width)
        self.layers = nnx.List(
            [Block(config, layer, rngs=rngs, dtype=dtype) for layer in range(config.num_layers)]
        )
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        if config.tie_embeddings:
            self.lm_head = None
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)
        self.mix = _mix(config, rngs, dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        state: State | None = None,
        lengths: Int[Array, "B"] | None = None,
        boundaries: Int[Array, "... NB"] | None = None,
        last_only: bool = False,
    ) -> tuple[Float[Array, "B U V"], State, *tuple[State, ...]]:
        """Reads tokens, going on from `state`. A pure function: nothing in the module changes.

        Args:
            tokens: token ids.
            state: what the rows have absorbed, with room for these tokens; None for nothing, as in training
                (a `ModelState` without room for more is returned then).
            lengths: tokens of each row that count; the rest is padding, which touches nothing and whose
                logits mean nothing.
            boundaries: token counts of this call, 0..T, at which the state is returned too.
            last_only: logits of each row's last token only.

        Returns:
            float32 logits, [B, T, vocab] or [B, 1, vocab]; the state behind each row's last token; and with
            `boundaries` the states there, recurrent and window [B, NB, ...] and position [B, NB].
        """
        x = Residuals(self.embed[...][tokens])
        # All layers stand at the same position: read one, so that the copies cost nothing.
        olds = [None] * len(self.layers)
        if state is not None:
            olds = [old._replace(position=state.position) for old in state.layers]
        news, ats = [], []
        for block, old in zip(self.layers, olds, strict=True):
            x, new, *at = block(x, old, lengths=lengths, boundaries=boundaries)
            news.append(new)
            ats += at
        y = _read(x, self.mix)
        logits = self._head_of_last(y, lengths) if last_only else self.head(y)
        # Without a state there is nothing to tell its kind from.
        kind: type[State] = ModelState if state is None else type(state)  # pyright: ignore[reportAssignmentType]
        new = kind(tuple(news))
        return (logits, new) if boundaries is None else (logits, new, kind(tuple(ats)))

    def _head_of_last(
        self, x: Float[Array, "B T D"], lengths: Int[Array, "B"] | None
    ) -> Float[Array, "B 1 V"]:
        """The head on each row's last token, with the bits that it has among all tokens."""
        rows = x.shape[0]
        x = jnp.pad(_last(x, lengths), ((0, max(0, MIN_ROWS - rows)), (0, 0), (0, 0)))
        return self.head(x)[:rows]

    def head(self, x: Float[Array, "B U D"]) -> Float[Array, "B U V"]:
        """Float32 logits of what all layers made of the tokens."""
        x = rms_norm(x, self.norm[...], eps=self.config.rms_norm_eps)
        kernel = self.embed[...].T if self.lm_head is None else self.lm_head.kernel[...]
        return rows_matmul(x.reshape(-1, x.shape[-1]), kernel, precision=None).reshape(
            *x.shape[:-1], kernel.shape[-1]
        )


def _attention(
    config: ModelConfig, layer: int, rngs: nnx.Rngs, dtype: DTypeLike
) -> KimiDeltaAttention | MultiHeadLatentAttention:
    if config.layers[layer] == "kda":
        return KimiDeltaAttention(
            config.hidden_size,
            config.kda_num_heads,
            config.kda_head_dim,
            v_head_dim=config.kda_v_head_dim,
            num_v_heads=config.kda_num_v_heads,
            conv_size=config.conv_size,
            gate_lower_bound=config.gate_lower_bound,
            full_rank_gate=config.full_rank_gate,
            norm_eps=config.rms_norm_eps,
            rngs=rngs,
            dtype=dtype,
        )
    return MultiHeadLatentAttention(
        config.hidden_size,
        config.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        output_gate=config.mla_output_gate,
        latent_norm_eps=config.latent_norm_eps,
        rngs=rngs,
        dtype=dtype,
    )


def _mix(config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> ResidualMix | None:
    if config.attn_res_block_size is None:
        return None
    return ResidualMix(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs, dtype=dtype)


def _read(x: Residuals, mix: ResidualMix | None) -> Float[Array, "B T D"]:
    return x.sum if mix is None else mix(x)


def _live(x: Float[Array, "B T D"], lengths: Int[Array, "B"] | None) -> Bool[Array, "B T"] | None:
    if lengths is None:
        return None
    return jnp.arange(x.shape[1]) < lengths[:, None]


def _last(x: Float[Array, "B T D"], lengths: Int[Array, "B"] | None) -> Float[Array, "B 1 D"]:
    if lengths is None:
        return x[:, -1:]
    at = jnp.maximum(lengths.astype(jnp.int32) - 1, 0)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)
