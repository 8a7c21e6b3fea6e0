"""What to keep: policies that a store asks which checkpoint to give up, each a value without I/O."""

from cache.retention.learned import Learned
from cache.retention.named import policy
from cache.retention.protocol import Boundary, Creation, Kind, Policy
from cache.retention.recency import Recency

__all__ = ["Boundary", "Creation", "Kind", "Learned", "Policy", "Recency", "policy"]
