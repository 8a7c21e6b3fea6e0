"""Operators: arrays to arrays."""
