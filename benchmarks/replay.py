"""Replays a trace through the cache: its index, its plan and a policy, with sizes for bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.trace import BLOCK, Request
from cache.namespace import Namespace
from cache.payload import Sized
from cache.placement import place
from cache.plan import Limits
from cache.retention import Kind, Policy
from cache.store import Store
from cache.tier import Tier

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
        `made` and `evicted` checkpoints; `held` at the end; `requests_per_s`; `seconds`.
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
    state, page = Sized(sizes.checkpoint), Sized(BLOCK * sizes.row)
    recomputed = total = hits = 0
    start = time.perf_counter()
    for request in requests:
        tokens, now = request.tokens(), request.seconds
        seen = store.match(namespace, tokens)
        resumed = store.plan(seen, len(tokens), limits)
        store = store.used(seen, resumed.key, now)
        recomputed += len(tokens) - resumed.boundary
        total += len(tokens)
        hits += resumed.boundary > 0
        creation = store.shelves[Tier.DEVICE].policy.creation
        if Kind.PROMPT_END not in creation.kinds and Kind.MISSING in creation.kinds:
            end = limits.floor(len(tokens))
            store = store.remember(namespace, tokens[:end], kind=Kind.PROMPT_END, now=now) if end else store
        # the deepest first: a shallow one alone would be weighed as if it had to serve what lies behind it
        for boundary, kind in reversed(place(resumed, len(tokens), limits, creation)):
            store = store.put(
                namespace, tokens[:boundary], state, [page] * (boundary // BLOCK), kind=kind, now=now
            )
    seconds = time.perf_counter() - start
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
