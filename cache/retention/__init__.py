"""What to keep: policies that a store asks which checkpoint to give up, each a value without I/O."""

from cache.retention.protocol import Boundary, Creation, Kind, Policy

__all__ = ["Boundary", "Creation", "Kind", "Policy"]
