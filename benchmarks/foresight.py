"""What a cache could do that knew which requests come: a yardstick for policies, reached by no rule of a real one.

At each request it may make a checkpoint at any block that it passes, and makes those that some later request will
resume from at its best. It gives up what is worth least: tokens saved by the next use, a byte freed and a request
waited. That is Belady's rule with sizes, so what it reaches can be reached; what every cache must compute is `unseen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.replay import GB, Sizes
from benchmarks.trace import BLOCK, Request

_LOOKED_AT = 8
"""How many of those that seemed worth least are weighed anew before one is given up."""


def resumable(request: Request) -> tuple[int, ...]:
    """The blocks that a request can resume behind: its last token is always computed."""
    return request.blocks[: (request.num_tokens - 1) // BLOCK]


def goals(requests: Sequence[Request]) -> list[int]:
    """How many blocks each request shares with those before it, of those that it can resume behind."""
    seen: set[int] = set()
    shared = []
    for request in requests:
        blocks = resumable(request)
        # ids of blocks form a tree, so the first unseen one ends what is shared
        shared.append(next((at for at, block in enumerate(blocks) if block not in seen), len(blocks)))
        seen.update(request.blocks)
    return shared


def unseen(requests: Sequence[Request]) -> float:
    """The part of all prompt tokens that no earlier prompt shares: recomputed with any budget."""
    tokens = sum(request.num_tokens for request in requests)
    return 1 - BLOCK * sum(goals(requests)) / tokens


class _Held:
    """Checkpoints by the block that they stand behind, and the latents before them."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.parent: dict[int, int] = {}
        self.depth: dict[int, int] = {-1: 0}
        self.needed: dict[int, int] = {}
        """By block: held checkpoints at it or behind it."""
        self.next_use: dict[int, int] = {}
        self.nbytes = 0

    def know(self, blocks: Sequence[int]) -> None:
        above = -1
        for depth, block in enumerate(blocks, 1):
            self.parent[block], self.depth[block], above = above, depth, block

    def change(self, block: int, held: int) -> None:
        """One checkpoint more or less."""
        self.nbytes += held * self.sizes.checkpoint
        while block != -1:
            count = self.needed.get(block, 0)
            self.needed[block] = count + held
            if count == 0 or count + held == 0:
                self.nbytes += held * BLOCK * self.sizes.row
            block = self.parent[block]

    def value(self, block: int) -> float:
        """Tokens saved over the next held one below, a byte freed."""
        lower = self.parent[block]
        while lower != -1 and lower not in self.next_use:
            lower = self.parent[lower]
        alone = block
        while alone != -1 and self.needed[alone] == 1:
            alone = self.parent[alone]
        saved = self.depth[block] - self.depth[lower]
        own = self.depth[block] - self.depth[alone]
        return BLOCK * saved / (self.sizes.checkpoint + own * BLOCK * self.sizes.row)


def foresee(requests: Sequence[Request], sizes: Sizes, budget_gb: float) -> dict[str, Any]:
    """Serves every request, one after the other, knowing all of them.

    Returns:
        `recomputed`, `hits`, `made`, `evicted`, `held`, `requests` as `replay` has them.
    """
    held, values, budget = _Held(sizes), dict[int, float](), int(budget_gb * GB)
    uses: dict[int, list[int]] = {}
    for at, (request, goal) in enumerate(zip(requests, goals(requests))):
        if goal:
            uses.setdefault(request.blocks[goal - 1], []).append(at)
    for waiting in uses.values():
        waiting.reverse()
    recomputed = hits = made = evicted = 0
    for now, request in enumerate(requests):
        hit = next((b for b in reversed(resumable(request)) if b in held.next_use), -1)
        recomputed += request.num_tokens - BLOCK * held.depth[hit]
        hits += hit != -1
        held.know(request.blocks)
        for block in request.blocks:
            waiting = uses.get(block, [])
            while waiting and waiting[-1] <= now:
                waiting.pop()
            if waiting and block not in held.next_use:
                held.change(block, 1)
                made += 1
            if waiting:
                held.next_use[block] = waiting[-1]
                values[block] = held.value(block)
            elif held.next_use.pop(block, None) is not None:
                del values[block]
                held.change(block, -1)
        while held.nbytes > budget:
            block = _least(held, values, now)
            del held.next_use[block], values[block]
            held.change(block, -1)
            evicted += 1
    total = sum(request.num_tokens for request in requests)
    return {
        "recomputed": recomputed / total,
        "hits": hits,
        "made": made,
        "evicted": evicted,
        "held": len(values),
        "requests": len(requests),
    }


def _least(held: _Held, values: dict[int, float], now: int) -> int:
    """The checkpoint to give up; weighs those anew that seemed worth least when they were weighed last."""
    blocks = np.fromiter(values, np.int64, len(values))
    waits = np.fromiter(held.next_use.values(), np.float64, len(values)) - now
    worths = np.fromiter(values.values(), np.float64, len(values)) / waits
    few = min(_LOOKED_AT, len(values)) - 1
    worst = blocks[np.argpartition(worths, few)[: few + 1]].tolist()
    for block in worst:
        values[block] = held.value(block)
    return min(worst, key=lambda block: values[block] / (held.next_use[block] - now))
