"""How pushes end."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How a push ended for its caller."""

    DONE = "done"
    """Every byte is in the peer's memory, and its notice that says so was delivered."""
    BOUNDS = "bounds"
    """Refused: a remote page twice, or none of the peer's."""
    LAYOUT = "layout"
    """Refused: the peer has other planes, or pages of another size."""
    STALE = "stale"
    """Refused: the descriptor is of an earlier start of the peer; ask it for the one of today."""
    REPEATED = "repeated"
    """Refused: this link pushed the attempt before, and how that ended is what counts."""
    BUSY = "busy"
    """Refused: this link has as many pushes in the library as it may have."""
    UNREACHABLE = "unreachable"
    """No answer from where the descriptor says, as from a peer that has ended."""
    FAILED = "failed"
    """The connection broke or the peer refused it after bytes were sent, or the notice was not delivered."""
    LATE = "late"
    """The deadline passed first. It may have arrived or not, or arrive yet."""

    @property
    def untouched(self) -> bool:
        """Whether no byte of the peer was or will be written; then, as nothing else tells the peer, its caller may
        (`PageLink.gone`)."""
        return self not in (Outcome.DONE, Outcome.REPEATED, Outcome.FAILED, Outcome.LATE)
