"""Named buffers to another process or tier: packing, manifests, object stores, page transfer.

Knows bytes and names; no jax, no tokens. Empty today.
"""
