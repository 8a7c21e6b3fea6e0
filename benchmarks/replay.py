"""Replays a trace through the cache: its index, its plan and a policy, with sizes for bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.trace import BLOCK, Request
from cache.namespace import Namespace
from cache.payload import Sized
from cache.placement import place
from cache.plan import Limits, ResumePlan
from cache.retention import Kind, Policy
from cache.store import Store
from cache.tier import Tier
from cache.tokens import Tokens
from cache.view import View

GB = 10**9


class Sizes(NamedTuple):
    """What a model's cache takes, in bytes: the state of a checkpoint, and the latents of a token."""

    checkpoint: int
    row: int


def replay(
    requests: Sequence[Request],
    policy: Policy,
    sizes: Sizes,
    budget_gb: float,
) -> dict[str, Any]:
    """Serves every request, one after the other, from one tier.

    Args:
        requests: a trace.
        policy: an empty one.
        sizes: of the model.
        budget_gb: for latents and checkpoints together, in 10^9 bytes.

    Returns:
        `recomputed`: tokens not resumed over tokens of all prompts; `hits`: requests that resumed anywhere;
        `made` and `evicted` checkpoints; `held` at the end; `requests_per_s`; `seconds`, which the cache took: a
        request comes with its tokens.
    """
    namespace = Namespace(weights=b"replay", tokenizer=b"replay").digest()
    limits = Limits(grid=BLOCK)
    store = Store.empty(
        {Tier.DEVICE: int(budget_gb * GB)},
        policy,
        state_nbytes=sizes.checkpoint,
        row_nbytes=sizes.row,
        page=BLOCK,
    )
    recomputed = total = hits = 0
    seconds = 0.0
    with _no_collector():
        for request in requests:
            tokens, now = request.tokens(), request.seconds
            start = time.perf_counter()
            seen = store.match(namespace, tokens)
            resumed = store.plan(seen, len(tokens), limits)
            store = _publish(
                store.used(seen, resumed.key, now), namespace, tokens, seen, resumed, limits, now
            )
            seconds += time.perf_counter() - start
            recomputed += len(tokens) - resumed.boundary
            total += len(tokens)
            hits += resumed.boundary > 0
    counts, held = store.stats().counts, store.stats().tiers[Tier.DEVICE]
    return {
        "recomputed": recomputed / total,
        "hits": hits,
        "made": counts.puts,
        "evicted": counts.evicted,
        "held": held.checkpoints,
        "requests": len(requests),
        "seconds": seconds,
        "requests_per_s": len(requests) / seconds,
    }


def _publish(
    store: Store,
    namespace: bytes,
    tokens: Tokens,
    seen: View,
    resumed: ResumePlan,
    limits: Limits,
    now: float,
) -> Store:
    """Puts what the policy has a prefill make, the deepest first: a shallow checkpoint alone would be weighed as if it
    had to serve what lies behind it."""
    creation = store.shelves[Tier.DEVICE].policy.creation
    end = limits.floor(len(tokens))
    if end and Kind.PROMPT_END not in creation.kinds and Kind.MISSING in creation.kinds:
        store = store.remember(namespace, tokens[:end], kind=Kind.PROMPT_END, now=now)
    state, page = Sized(store.state_nbytes), Sized(BLOCK * store.row_nbytes)
    for boundary, kind in reversed(place(resumed, len(tokens), limits, creation)):
        pages = [page] * (boundary // BLOCK)
        store = store.put(namespace, tokens[:boundary], state, pages, kind=kind, now=now, seen=seen)
    return store


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without the search for cycles, which finds none here and takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
