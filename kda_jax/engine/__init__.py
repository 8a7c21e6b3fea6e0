"""What joins a model with the prefix cache."""

from kda_jax.engine.checkpoint import Checkpoint, cut, join

__all__ = ["Checkpoint", "cut", "join"]
