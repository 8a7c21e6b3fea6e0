"""What a model is made of: sizes, the pattern of its layers, and the presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

AttentionKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]

_PERIOD: tuple[AttentionKind, ...] = ("kda", "kda", "kda", "mla")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and options of a Kimi Linear or Kimi K3 language model.

    `layers[i]` and `mlps[i]` name the two halves of layer i. Widths are in channels, names follow the
    Hugging Face config where that one is clear. `latent_norm_eps` belongs to the norms of the MLA latents
    (the released models keep the class default of 1e-6 there), `rms_norm_eps` to all other norms.

    Raises:
        ValueError: if a size is not positive, or two sizes do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[str, ...]  # "kda" or "mla"
    mlps: tuple[str, ...]  # "dense" or "moe"
    intermediate_size: int
    model_max_length: int
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    tie_embeddings: bool = False

    # KDA
    kda_num_heads: int
    kda_head_dim: int
    kda_v_head_dim: int | None = None
    kda_num_v_heads: int | None = None
    conv_size: int = 4
    gate_lower_bound: float | None = None
    full_rank_gate: bool = False

    # MLA
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    mla_output_gate: bool = False

    # Mixture of experts
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    num_expert_groups: int = 1
    topk_groups: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0

    # Kimi K3's own parts
    attn_res_block_size: int | None = None  # layers; each block's sum stays readable to all later layers
    routed_expert_hidden_size: int | None = None  # width of the latents that the routed experts work on
    latent_moe_norm: bool = False
    situ_beta: float | None = None
    situ_linear_beta: float | None = None
    quantization: Literal["mxfp4"] | None = None  # how the routed experts are held

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    media_placeholder_token_id: int | None = (
        None  # stands for a piece of an image; prompts with it are refused
    )

    def __post_init__(self) -> None:
        if self.kda_v_head_dim is None:
            object.__setattr__(self, "kda_v_head_dim", self.kda_head_dim)
        if self.kda_num_v_heads is None:
            object.__setattr__(self, "kda_num_v_heads", self.kda_num_heads)
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "mlps", tuple(self.mlps))
        _check(self)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def kda_value_heads(self) -> int:
        """Number of KDA value heads (HV), a multiple of `kda_num_heads`."""
        return self.kda_num_v_heads or self.kda_num_heads

    @property
    def kda_value_dim(self) -> int:
        """Channels of one KDA value head (V)."""
        return self.kda_v_head_dim or self.kda_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of KDA's short convolution: q, k and v side by side."""
        return 2 * self.kda_num_heads * self.kda_head_dim + self.kda_value_heads * self.kda_value_dim

    @property
    def latent_size(self) -> int:
        """Channels MLA caches for one token: the latent and the shared key part (R + P)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a text, as the config names them."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def k3_parts(self) -> tuple[str, ...]:
        """Names of the set fields that only Kimi K3 has (see the class's last group)."""
        names = (
            "attn_res_block_size",
            "routed_expert_hidden_size",
            "latent_moe_norm",
            "situ_beta",
            "quantization",
        )
        return tuple(name for name in names if getattr(self, name) not in (None, False))

    @classmethod
    def kimi_linear_48b(cls) -> ModelConfig:
        """Kimi-Linear-48B-A3B: 27 layers, 20 of them KDA, 48 B parameters, 3 B active."""
        return cls(
            vocab_size=163840, hidden_size=2304, layers=(*_PERIOD * 6, "kda", "kda", "mla"), mlps=_mlps(27),
            intermediate_size=9216, model_max_length=1048576,
            kda_num_heads=32, kda_head_dim=128,
            num_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            num_experts=256, experts_per_token=8, moe_intermediate_size=1024, num_shared_experts=1,
            routed_scaling_factor=2.446,
            bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
        )  # fmt: skip

    @classmethod
    def kimi_k3(cls) -> ModelConfig:
        """Kimi K3, the text model: 93 layers, 69 of them KDA, 2.8 T parameters, 104 B active."""
        return cls(
            vocab_size=163840, hidden_size=7168, layers=(*_PERIOD * 23, "mla"), mlps=_mlps(93),
            intermediate_size=33792, model_max_length=1048576,
            kda_num_heads=96, kda_head_dim=128, gate_lower_bound=-5.0, full_rank_gate=True,
            num_heads=96, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            q_lora_rank=1536, mla_output_gate=True,
            num_experts=896, experts_per_token=16, moe_intermediate_size=3072, num_shared_experts=2,
            attn_res_block_size=12, routed_expert_hidden_size=3584, latent_moe_norm=True,
            situ_beta=4.0, situ_linear_beta=25.0, quantization="mxfp4",
            bos_token_id=163584, eos_token_id=163586, pad_token_id=163839, media_placeholder_token_id=163605,
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> ModelConfig:
        """The byte-level model of `examples/`: 256 bytes and four special tokens, 2.9 M parameters, 1.3 M of which
        work on a token."""
        return cls(
            vocab_size=260, hidden_size=192, layers=(*_PERIOD, "kda"), mlps=_mlps(5),
            intermediate_size=384, model_max_length=1 << 20,
            kda_num_heads=2, kda_head_dim=64,
            num_heads=2, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48,
            num_experts=8, experts_per_token=2, moe_intermediate_size=96, num_shared_experts=1,
            bos_token_id=256, eos_token_id=257, pad_token_id=258,
        )  # fmt: skip

    @classmethod
    def bench_41m(cls) -> ModelConfig:
        """The 41 M parameter model of `bench model`: real head sizes, few layers."""
        return cls(
            vocab_size=4096, hidden_size=512, layers=_PERIOD * 2, mlps=_mlps(8),
            intermediate_size=1536, model_max_length=65536, rms_norm_eps=1e-6,
            kda_num_heads=4, kda_head_dim=128,
            num_heads=4, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            num_experts=8, experts_per_token=2, moe_intermediate_size=256, num_shared_experts=1,
            routed_scaling_factor=2.446,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json` of model type "kimi_linear", or the text part of "kimi_k3".

        Raises:
            ValueError: if the config is of another model, lacks a key, or asks for what no Kimi model has.
        """
        from kda_jax.config.hf import fields_from_hf

        return cls(**fields_from_hf(config))

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` from which `from_hf` reads this config, as transformers understands it."""
        from kda_jax.config.hf import hf_from_config

        return hf_from_config(self)


def _mlps(count: int) -> tuple[MlpKind, ...]:
    """The first layer dense, all others sparse."""
    return tuple("moe" if layer else "dense" for layer in range(count))


def _check(config: ModelConfig) -> None:
    positive = (
        "vocab_size", "hidden_size", "intermediate_size", "model_max_length", "conv_size", "kda_num_heads",
        "kda_head_dim", "kda_v_head_dim", "kda_num_v_heads", "num_heads", "kv_lora_rank", "qk_nope_head_dim",
        "v_head_dim",
    )  # fmt: skip
    for name in positive:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    if config.conv_size < 2:
        raise ValueError(f"conv_size={config.conv_size} must be at least 2; a window of 1 is no convolution")
    if config.qk_rope_head_dim < 0:
        raise ValueError(f"qk_rope_head_dim={config.qk_rope_head_dim} must not be negative")
    if not config.layers or len(config.layers) != len(config.mlps):
        raise ValueError(
            f"layers and mlps must have one entry a layer, got {len(config.layers)} and {len(config.mlps)}"
        )
    for name, kinds in (("layers", {"kda", "mla"}), ("mlps", {"dense", "moe"})):
        if strange := set(getattr(config, name)) - kinds:
            raise ValueError(f"{name} may hold {sorted(kinds)}, got {sorted(strange)}")
    if config.kda_value_heads % config.kda_num_heads:
        raise ValueError(f"{config.kda_num_v_heads=} must be a multiple of {config.kda_num_heads=}")
    if config.gate_lower_bound is not None and not config.gate_lower_bound < 0:
        raise ValueError(
            f"gate_lower_bound={config.gate_lower_bound} must be negative: it bounds a log decay"
        )
    if config.attn_res_block_size is not None and config.attn_res_block_size < 1:
        raise ValueError(
            f"attn_res_block_size={config.attn_res_block_size} must be positive; None adds all layers into one sum"
        )
    bounds = (config.situ_beta, config.situ_linear_beta)
    if bounds != (None, None) and not all(bound is not None and bound > 0 for bound in bounds):
        raise ValueError(f"situ_beta and situ_linear_beta must both be positive, or both None, got {bounds}")
    if "moe" in config.mlps:
        _check_experts(config)
        _check_latent_experts(config)


def _check_experts(config: ModelConfig) -> None:
    experts, chosen = config.num_experts, config.experts_per_token
    groups, kept = config.num_expert_groups, config.topk_groups
    if experts < 1 or config.moe_intermediate_size < 1 or config.num_shared_experts < 0:
        raise ValueError(
            f"moe layers need {config.num_experts=} and {config.moe_intermediate_size=} positive, "
            f"{config.num_shared_experts=} not negative"
        )
    if groups < 1 or experts % groups or not 1 <= kept <= groups:
        raise ValueError(
            f"num_expert_groups={groups} must divide num_experts={experts}, and "
            f"topk_groups={kept} lie in 1..{groups}"
        )
    if groups > 1 and experts // groups < 2:
        raise ValueError(
            f"a group is rated by its two best experts, but {experts} in {groups} groups leaves one each"
        )
    if not 1 <= chosen <= kept * (experts // groups):
        raise ValueError(
            f"experts_per_token={chosen} must lie in 1..{kept * (experts // groups)}, "
            f"the number of experts in {kept} group(s)"
        )


def _check_latent_experts(config: ModelConfig) -> None:
    latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
    if latent is not None and latent < 1:
        raise ValueError(
            f"routed_expert_hidden_size={latent} must be positive; None for experts without latents"
        )
    if latent is None and config.latent_moe_norm:
        raise ValueError("latent_moe_norm wants routed_expert_hidden_size: it norms the experts' latents")
    width = config.hidden_size if latent is None else latent
    if config.quantization is not None and (width % 32 or inner % 32):
        raise ValueError(
            f"MXFP4 experts share a scale among 32 inputs: their widths {width} and {inner} must be multiples of 32"
        )
