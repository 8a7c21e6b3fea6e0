"""What Mooncake's codes mean to a caller.

Source: kvcache-ai/Mooncake 0.3.13, mooncake-store/include/types.h; what each is seen for was tried.
"""

from __future__ import annotations

FAILED = -1
SHORT = -600  # of a get: beyond the object's end
BUSY = -600  # of a put: another thread of this process is putting the same name
UNFINISHED = -703
EXISTS = -705
LATE = -10_000  # none of Mooncake's: no time was left

OUTCOMES = {
    -200: "full",  # no room now, no segment as large, or nobody who lends memory
    UNFINISHED: "unfinished",  # its writer has not ended, or died
    -704: "absent",
    -706: "leased",  # it was read or asked about a moment ago
    -707: "expired",  # its lease ended while it was read: what was read may be another object's
    -800: "transfer",  # the process that holds it, or was to hold it, does not answer
    -801: "checksum",
    -900: "unreachable",  # the master does not answer
    -901: "unreachable",
    LATE: "late",
}
"""The outcome by which `Counters` knows a code; any other negative one is `refused`."""

SICK = frozenset({"transfer", "unreachable", "late", "broken"})
"""Outcomes that the circuit breaker counts."""


def outcome(code: int) -> str:
    """A word for a negative code."""
    return OUTCOMES.get(code, "refused")
