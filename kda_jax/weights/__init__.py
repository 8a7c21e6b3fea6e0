"""Weights in and out: Hugging Face checkpoints, Orbax checkpoints, and saved states."""

from kda_jax.weights.errors import WeightsError
from kda_jax.weights.load import load
from kda_jax.weights.orbax import load_orbax, load_state_orbax, save_orbax, save_state_orbax
from kda_jax.weights.save import save
from kda_jax.weights.statefile import load_state, save_state

__all__ = [
    "WeightsError",
    "load",
    "load_orbax",
    "load_state",
    "load_state_orbax",
    "save",
    "save_orbax",
    "save_state",
    "save_state_orbax",
]
