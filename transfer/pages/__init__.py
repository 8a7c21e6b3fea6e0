"""Pushing pages of memory into another process: registered pools, descriptors, attempts.

A page is bytes; what they mean is for the two callers to agree on.
"""

from transfer.pages.descriptor import Descriptor, Plane
from transfer.pages.inbox import Arrival, Change
from transfer.pages.link import PageLink
from transfer.pages.loopback import Fault, LoopbackWire, Network, random_faults
from transfer.pages.mooncake_wire import MooncakeWire
from transfer.pages.outbox import Sent
from transfer.pages.outcome import Outcome
from transfer.pages.pool import Pool

__all__ = [
    "Arrival",
    "Change",
    "Descriptor",
    "Fault",
    "LoopbackWire",
    "MooncakeWire",
    "Network",
    "Outcome",
    "PageLink",
    "Plane",
    "Pool",
    "Sent",
    "random_faults",
]
