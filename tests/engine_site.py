"""A small model's programs, compiled once for all tests of the engine, and what they make of a prompt alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cache import Namespace, Tier
from kda_jax.engine import Engine, Layout, Programs
from kda_jax.engine.pages import PoolPages
from kda_jax.engine.programs import Lane
from random_model import random_model, small_config

CONFIG = small_config()
NAMESPACE = Namespace(weights=b"small", tokenizer=b"none")
SIZES: dict[str, Any] = dict(slots=4, nbytes=2**20, max_tokens=512, budget=128)
ROUNDING = 1e-4
"""Logits of one token in two orders of computing, absolute (design: float32 of a tiny model)."""


@functools.cache
def uncompiled() -> Programs:
    """Of the small model and `SIZES`, each compiled when it is first called."""
    parts = random_model(CONFIG)
    sizes = {"nbytes": SIZES["nbytes"], "num_slots": SIZES["slots"] + 1, "max_tokens": SIZES["max_tokens"]}
    return Programs(
        parts, Layout.within(CONFIG, np.float32, **sizes), most_tokens=SIZES["budget"], most_drafts=3
    )


@functools.cache
def programs() -> Programs:
    """The same, all compiled."""
    uncompiled().compile_all()
    return uncompiled()


def engine(**options: Any) -> Engine:
    """An engine of the small model, with `programs` if no others are given."""
    made = uncompiled() if "programs" in options else programs()
    return Engine(
        (made.graphdef, made.params), **{**SIZES, "namespace": NAMESPACE, "programs": made, **options}
    )


class Cold(NamedTuple):
    """Tokens, and the logits that each was chosen from, float32 [n, vocab]."""

    tokens: list[int]
    logits: np.ndarray


def cold(prompt: Sequence[int], count: int, made: Programs | None = None) -> Cold:
    """What a prompt alone makes, in a memory without a past; with the small model's programs if none are given."""
    made = made or programs()
    size = made.chunks[-1]
    prompt, memory = list(prompt), made.empty()
    memory = made.zero(memory, 1)
    pages = range(1, 1 + made.layout.table_width)
    chosen = None
    for start in range(0, len(prompt), size):
        memory, chosen = made.prefill(memory, prompt[start : start + size], Lane(1, pages, start))
    assert chosen is not None
    tokens, logits = [], []
    for position in range(len(prompt), len(prompt) + count):
        token, row = jax.device_get((chosen.tokens, chosen.logits))
        tokens.append(int(token[0]))
        logits.append(row[0])
        if len(tokens) < count:
            memory, chosen = made.decode(memory, tokens[-1:], [Lane(1, pages, position)])
    return Cold(tokens, np.stack(logits))


def differs(got: Sequence[int], alone: Cold) -> bool:
    """Whether `got` differs from the first tokens of a prompt alone. One may where two candidates are within rounding;
    what follows then is another text."""
    for at, token in enumerate(got):
        if token != alone.tokens[at]:
            gap = alone.logits[at].max() - alone.logits[at][token]
            assert gap <= 2 * ROUNDING, f"token {at}: {gap=}"
            return True
    return False


def assert_cold(prompt: Sequence[int], got: Sequence[int], count: int) -> bool:
    """That `got` begins what `prompt` makes alone, but for rounding. Whether it differs."""
    return differs(got, cold(prompt, count))


def conserved(made: Engine) -> None:
    """Law 10, between steps of an engine in which nothing runs: every page and slot is free or the cache's, once all
    that is cached is given up all are free."""
    scheduler = made._loop.scheduler
    assert not scheduler.live and not made._holder.store.pinned
    held = [0] * made.layout.num_pages
    shelf = made._holder.store.shelves[Tier.DEVICE]
    for payload in (*shelf.states.values(), *shelf.pages.values()):
        assert isinstance(payload, PoolPages)
        for page in payload.pages:
            held[page] += 1
    assert scheduler.pool.pages.free == held[1:].count(0)
    assert held == scheduler.pool.pages.holders
    assert scheduler.holdings.slots.free == made.layout.num_slots - 1
