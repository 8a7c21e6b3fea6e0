"""What can go wrong in a way that the caller must hear of."""

from __future__ import annotations


class TransferError(Exception):
    """Any error of this package."""


class Closed(TransferError):
    """A store was used after it was closed."""


class Unavailable(TransferError):
    """A store cannot be opened: says what is missing, or did not answer, and what to do about it."""
