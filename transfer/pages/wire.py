"""What carries a link's bytes and notices: the library, or a network in memory for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from transfer.objects import Bytes
from transfer.pages.descriptor import Descriptor
from transfer.pages.inbox import Notice
from transfer.pages.outcome import Outcome


class Order(NamedTuple):
    """A checked push.

    Attributes:
        descriptor: of the peer.
        attempt: the peer's number for it.
        sources: views of this process's memory, uint8 `[nbytes]` each.
        targets: their addresses in the peer, as many.
        returned: called once, when the library reads the sources no more.
    """

    descriptor: Descriptor
    attempt: int
    sources: list[Bytes]
    targets: list[int]
    returned: Callable[[], None]


class Wire(Protocol):
    """What carries a link's bytes and notices."""

    @property
    def address(self) -> str:
        """`host:port` for descriptors."""
        ...

    def register(self, buffers: Sequence[Bytes]) -> None:
        """Lets peers write to these buffers and read them, until `close`."""
        ...

    def send(self, order: Order, timeout: float) -> Outcome:
        """Writes it all, then gives the notice; back by the deadline. No byte is sent before the peer's control bytes
        were read and found to be the descriptor's."""
        ...

    def notices(self) -> list[Notice]:
        """What came in since the last call."""
        ...

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def close(self) -> None:
        """Peers write no more when this returns. A second close does nothing."""
        ...


CONTROL_NBYTES = 16


def control_bytes(epoch: int) -> Bytes:
    """What a link holds at its descriptor's `control`, uint8 `[CONTROL_NBYTES]`: a mark and the epoch."""
    return np.frombuffer(b"kdapages" + epoch.to_bytes(8, "little"), np.uint8).copy()
