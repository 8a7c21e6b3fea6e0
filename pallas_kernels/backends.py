"""Chooses which implementation of an operator runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PREFERENCE = ("xla",)
"""What `implementation=None` tries, best first. The definition is never a silent substitute."""


class Backend(NamedTuple):
    """One implementation of an operator, for one call.

    Attributes:
        run: the function to call.
        refusal: why this backend cannot do this call ("K=96 is not a power of two"), or None when it can.
    """

    run: Callable[..., Any]
    refusal: str | None = None


def choose(op: str, implementation: str | None, backends: Mapping[str, Backend]) -> Callable[..., Any]:
    """Picks the function that runs `op`; nothing falls back in silence.

    Args:
        op: the operator's public name, for the error message.
        implementation: a key of `backends`, or None for the first of `PREFERENCE` that does not refuse.
        backends: what exists, each with its refusal for the call at hand.

    Raises:
        ValueError: the name is unknown, or the backend asked for (with None: every one) refuses; the message
            has all refusals.
    """
    if implementation is None:
        for name in PREFERENCE:
            if name in backends and backends[name].refusal is None:
                return backends[name].run
        raise ValueError(f"{op}: no implementation can do this call. {_reasons(backends)}")
    if implementation not in backends:
        raise ValueError(
            f"{op}: unknown {implementation=}; use one of {sorted(backends)}, or None to choose by device"
        )
    if backends[implementation].refusal is not None:
        raise ValueError(f"{op}: {implementation=} cannot do this call. {_reasons(backends)}")
    return backends[implementation].run


def _reasons(backends: Mapping[str, Backend]) -> str:
    return "; ".join(f"{name}: {backend.refusal or 'can do it'}" for name, backend in backends.items())
