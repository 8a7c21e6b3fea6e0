"""Model configs: `ModelConfig` and its Hugging Face form."""

from kda_jax.config.model_config import AttentionKind, MlpKind, ModelConfig

__all__ = ["AttentionKind", "MlpKind", "ModelConfig"]
