"""Named buffers to another process or tier: packing, manifests, object stores, page transfer.

Knows bytes and names; no jax, no tokens.
"""

from transfer.checkpoint import Checkpoint, fetch, publish, withdraw
from transfer.counters import Counters, Operation, Recorder
from transfer.disk import DiskObjects
from transfer.errors import Closed, Conflict, TransferError, Unavailable
from transfer.manifest import About, Miss
from transfer.memory import MemoryObjects
from transfer.objects import Bytes, Item, Objects, Put, Read

__all__ = [
    "About",
    "Bytes",
    "Checkpoint",
    "Closed",
    "Conflict",
    "Counters",
    "DiskObjects",
    "Item",
    "MemoryObjects",
    "Miss",
    "Objects",
    "Operation",
    "Put",
    "Read",
    "Recorder",
    "TransferError",
    "Unavailable",
    "fetch",
    "publish",
    "withdraw",
]
