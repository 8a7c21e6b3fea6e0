"""Weights in and out: Hugging Face checkpoints, Orbax checkpoints, and saved states."""
