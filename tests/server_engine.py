"""An engine in place of the real one: it repeats its prompt, and does what a test tells it to."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any, Literal

import numpy as np

from cache.stats import TierStats
from kda_jax.engine import (
    Closed,
    Explanation,
    Finished,
    Limit,
    Outcome,
    Overloaded,
    Refused,
    Stream,
    Token,
    TreeNode,
    Usage,
)
from kda_jax.engine import stream as streams
from kda_jax.engine.statistics import Statistics, Times
from kda_jax.sampling import Sampler

HALF_NAT, GREEDY, TIMES = -0.5, Sampler(), streams.Times(0.0, 0.0, 0.0)


class EchoEngine:
    """Token i of a continuation is token (i + seed) of the prompt, again and again; its probability is the same always.

    A second request of a tenant with the same prompt has all but its last token from the device.

    Attributes:
        hold: while it is clear, requests get one token and wait.
        error: raised by `submit`, if there is one.
        fails: whether requests fail after one token.
        closed: why nothing is taken any more.
        submitted: what `submit` was given.
        cancelled: ids of requests that were cancelled before their end.
    """

    def __init__(self) -> None:
        self.hold, self.error, self.fails = threading.Event(), None, False
        self.hold.set()
        self.error: Exception | None = None
        self.submitted: list[dict[str, Any]] = []
        self.cancelled: list[int] = []
        self.live: dict[int, threading.Event] = {}
        self._ids, self._seen = itertools.count(), Counter()
        self.closed: str | None = None

    def submit(
        self,
        tokens: np.ndarray,
        *,
        max_new_tokens: int,
        sampler: Sampler = GREEDY,
        seed: int = 0,
        timeout: float | None = None,
        tenant: str = "",
        logprobs: int = 0,
    ) -> Stream:
        if self.closed:
            raise Closed(self.closed)
        if self.error is not None:
            raise self.error
        tokens = tokens.tolist()
        given = {"tokens": tokens, "max_new_tokens": max_new_tokens, "sampler": sampler, "seed": seed}
        self.submitted.append(given | {"timeout": timeout, "tenant": tenant, "logprobs": logprobs})
        id, ended = next(self._ids), threading.Event()
        stream = Stream(id, lambda _: ended.set())
        self.live[id] = ended
        cached = len(tokens) - 1 if self._seen[tenant, tuple(tokens)] else 0
        self._seen[tenant, tuple(tokens)] += 1
        threading.Thread(
            target=self._generate,
            args=(stream, ended, tokens, max_new_tokens, seed, logprobs, cached, timeout),
        ).start()
        return stream

    def _generate(
        self,
        stream: Stream,
        ended: threading.Event,
        tokens: list[int],
        most: int,
        seed: int,
        logprobs: int,
        cached: int,
        timeout: float | None,
    ) -> None:
        reason: Literal["length", "cancelled", "expired", "failed"] = "length"
        made = []
        for i in range(most):
            if ended.is_set():
                reason = "cancelled"
                break
            token = tokens[(i + seed) % len(tokens)]
            made.append(token)
            top = tuple((t, HALF_NAT - t) for t in range(logprobs))
            stream.put(Token(token, HALF_NAT, top) if logprobs else Token(token))
            if self.fails:
                reason = "failed"
                break
            waited = 0.0
            while not self.hold.wait(0.005) and not ended.is_set():
                waited += 0.005
                if timeout is not None and waited > timeout:
                    reason = "expired"
                    break
            if reason == "expired":
                break
        if reason == "cancelled":
            self.cancelled.append(stream.id)
        outcome = {"length": Outcome.FINISHED, "cancelled": Outcome.CANCELLED}.get(reason, Outcome.FAILED)
        usage = Usage(len(tokens), len(made), {"device": cached} if cached else {})
        error = "the test said so" if reason == "failed" else None
        del self.live[stream.id]
        stream.end(Finished(outcome, reason, tuple(made), usage, error, TIMES))

    def drain(self, timeout: float) -> bool:
        self.closed = "about to close"
        running = list(self.live.values())
        finished = self.hold.wait(timeout)
        if not finished:
            for ended in running:
                ended.set()
        return finished

    def explain(self, tokens: np.ndarray, *, tenant: str = "") -> Explanation:
        known = len(tokens) - 1 if self._seen[tenant, tuple(tokens)] else 0
        limit = Limit(known, "last token") if known else Limit(0, "parts here")
        return Explanation(
            len(tokens), known, "device" if known else None, {"device": known}, known, (limit,)
        )

    def statistics(self) -> Statistics:
        times = Times(4, 1.0, (0.1, 0.2, 0.3, 0.4))
        return Statistics(
            waiting=1,
            waiting_tokens=20,
            loading=2,
            running=len(self.live),
            slots=8,
            pages=100,
            pages_free=60,
            pages_cached=30,
            tiers={"device": TierStats(checkpoints=4, pages=5, nbytes=600, budget=7000)},
            remembered=7,
            ended={"finished": 3},
            computed_tokens=50,
            restored_tokens={"disk": 9},
            generated_tokens=11,
            drafted_tokens=18,
            accepted_tokens=19,
            first_token=times,
            per_token=times,
            step=times,
            evicted=12,
            lost=13,
            memory_lost=0,
            written={"disk": 14},
            unwritten={"disk": 15},
            stores={"remote": {"get failed": 16, "retries": 17, "breaker": "open"}},
        )

    def tree(self, most: int = 500, *, tenant: str | None = None) -> list[TreeNode]:
        found = []
        for number, (whose, tokens) in enumerate(self._seen, start=1):
            if tenant is None or whose == tenant:
                line = TreeNode(
                    number, 0, "ab", 0, len(tokens), True, "end", ("device",), ("device",), 0, 1.0
                )
                found.append(line)
        return found[:most]


REFUSALS = {
    "overloaded": Overloaded("full"),
    "refused": Refused("12 pages are more than 10"),
    "closed": Closed("no"),
    "invalid": ValueError("no such number"),
}
