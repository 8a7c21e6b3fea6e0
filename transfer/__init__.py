"""Named buffers to another process or tier: packing, manifests, object stores, page transfer.

Knows bytes and names; no jax, no tokens.
"""

from transfer.counters import Counters, Operation
from transfer.errors import Closed, Conflict, TransferError, Unavailable
from transfer.objects import Bytes, Item, Objects, Put, Read

__all__ = [
    "Bytes",
    "Closed",
    "Conflict",
    "Counters",
    "Item",
    "Objects",
    "Operation",
    "Put",
    "Read",
    "TransferError",
    "Unavailable",
]
