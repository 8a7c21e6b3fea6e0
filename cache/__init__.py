"""Checkpoints at token boundaries: keys, the prefix index, what to keep, what to drop, where to resume.

Knows leaves, rows, boundaries and bytes; no layers, no model, no store of anybody else's.
"""

from cache.ahead import Ahead, ahead
from cache.compression import Compressing, Compression
from cache.errors import Broken, Conflict
from cache.holder import Holder
from cache.keys import KeyChain
from cache.namespace import Namespace
from cache.payload import Payload, Sized
from cache.placement import Placed, place
from cache.plan import Limits, ResumePlan
from cache.restart import Saved, restore, save
from cache.store import Store
from cache.tier import Tier
from cache.tiers import InMemory, Loaded, Storage, demote, load, make_room, promote
from cache.tokens import Media
from cache.view import Rows, Seen, View

__all__ = [
    "Ahead",
    "Broken",
    "Compressing",
    "Compression",
    "Conflict",
    "Holder",
    "InMemory",
    "KeyChain",
    "Limits",
    "Loaded",
    "Media",
    "Namespace",
    "Payload",
    "Placed",
    "ResumePlan",
    "Rows",
    "Saved",
    "Seen",
    "Sized",
    "Storage",
    "Store",
    "Tier",
    "View",
    "ahead",
    "demote",
    "load",
    "make_room",
    "place",
    "promote",
    "restore",
    "save",
]
