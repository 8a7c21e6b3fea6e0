"""Checkpoints at token boundaries: keys, the prefix index, what to keep, what to drop, where to resume.

Knows leaves, rows, boundaries and bytes; no layers, no model, no store. Empty today.
"""
