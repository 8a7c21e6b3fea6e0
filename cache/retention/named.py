"""Policies by name."""

from __future__ import annotations

from cache.retention.learned import Learned
from cache.retention.protocol import Creation, Kind, Policy
from cache.retention.recency import Recency

NAMES = ("ours", "lru", "interval:N", "prompt_end", "prompt_end+branch", "second_use", "path_cap:N")
_BY_KINDS = {
    "lru": frozenset(Kind) - {Kind.INTERVAL, Kind.BEFORE_END},
    "prompt_end": {Kind.PROMPT_END},
    "prompt_end+branch": {Kind.PROMPT_END, Kind.BRANCH},
    "second_use": {Kind.BRANCH, Kind.MISSING},
    "interval": {Kind.INTERVAL},
    "path_cap": {Kind.PROMPT_END, Kind.BRANCH},
}


def policy(name: str) -> Policy:
    """An empty policy by its name.

    `ours` learns (`Learned`). All others give up what was used longest ago and differ in what they make:

    - `lru`: all that a plan proposes.
    - `interval:N`: one every N tokens. vLLM: `prefix_cache_retention_interval=N`; SGLang: `--mamba-track-interval N`.
    - `prompt_end`: the end of each prompt. SGLang without branch points.
    - `prompt_end+branch`: and where a prompt leaves another one. SGLang's `extra_buffer`; Marconi's admission.
    - `second_use`: where a prompt leaves another one, and ends that a second prompt passes. vLLM with an interval of 0.
    - `path_cap:N`: `prompt_end+branch` with at most N on a path. SGLang: `--mamba-max-states-per-path N`.

    Raises:
        ValueError: if there is no such policy.
    """
    if name == "ours":
        return Learned()
    kind, _, number = name.partition(":")
    counted = kind in ("interval", "path_cap")
    if (
        kind not in _BY_KINDS
        or counted != bool(number)
        or (counted and not (number.isdecimal() and int(number)))
    ):
        raise ValueError(f"no policy {name!r}; there are {', '.join(NAMES)}, with a positive number for N")
    kinds = frozenset(_BY_KINDS[kind])
    if kind == "interval":
        return Recency(creation=Creation(kinds=kinds, interval=int(number)))
    return Recency(creation=Creation(kinds=kinds), per_path=int(number) if kind == "path_cap" else None)
