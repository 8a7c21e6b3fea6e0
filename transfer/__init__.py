"""Named buffers to another process or tier: packing, manifests, object stores, page transfer.

Knows bytes and names; no jax, no tokens.
"""

from transfer.checkpoint import Checkpoint, fetch, fetch_all, publish, withdraw
from transfer.counters import Counters, Operation, Recorder
from transfer.disk import DiskObjects
from transfer.errors import Closed, TransferError, Unavailable
from transfer.finding import Found, find
from transfer.manifest import About, Miss
from transfer.marks import Ladder, Path, announce
from transfer.memory import MemoryObjects
from transfer.objects import Bytes, Item, Objects, Put, Read

__all__ = [
    "About",
    "Bytes",
    "Checkpoint",
    "Closed",
    "Counters",
    "DiskObjects",
    "Found",
    "Item",
    "Ladder",
    "MemoryObjects",
    "Miss",
    "Objects",
    "Operation",
    "Path",
    "Put",
    "Read",
    "Recorder",
    "TransferError",
    "Unavailable",
    "announce",
    "fetch",
    "fetch_all",
    "find",
    "publish",
    "withdraw",
]
