"""Kimi Linear in JAX."""
