"""What conversations ask, drawn before it is asked: branches, edits, packs; and what each prompt makes alone.

Prompts go on from what the model generates alone, so that a script is the same wherever it is played, and what its
prompts make alone is computed once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from engine_site import CONFIG, Cold, cold, uncompiled

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 300)
LONGEST, MOST_NEW = 300, 12
AT_ONCE = 24
"""Requests that have not been waited for, at most."""
PAUSE = 0.01
"""Seconds before a cancel, at most: a few steps."""


class Ask(NamedTuple):
    """A request.

    Attributes:
        prompt: its tokens.
        count: tokens to generate.
        kind: `new`, `turn` behind a whole text, `branch` behind a part of one, or the same prompt `again`.
        where: which engine, in [0, 1).
        priority, timeout: as `Engine.submit` takes them.
        logprobs: whether all logarithms of probability are told.
    """

    prompt: tuple[int, ...]
    count: int
    kind: str
    where: float
    priority: int
    timeout: float | None
    logprobs: bool

    @property
    def alone(self) -> Cold:
        """What it makes in a memory without a past."""
        return alone(self.prompt, self.count)


class Pack(NamedTuple):
    """Requests that come at once."""

    asks: tuple[Ask, ...]


class Cancel(NamedTuple):
    """After a pause one of those that came last is cancelled, wherever it stands."""

    which: int
    pause: float


class End(NamedTuple):
    """One is waited for."""

    which: int


class Lull(NamedTuple):
    """Nothing new comes until all that was computed is written to the slower tiers."""


Event: TypeAlias = Pack | Cancel | End | Lull


@lru_cache(maxsize=8192)
def alone(prompt: tuple[int, ...], count: int) -> Cold:
    return cold(prompt, count, uncompiled())


def next_prompt(choose: random.Random, histories: Sequence[Sequence[int]]) -> list[int]:
    """A new text, or a turn, an edit or a branch behind one before."""
    return _next(choose, histories)[1]


def script(events: int, seed: int, *, plain: bool = False, most_new: int = MOST_NEW) -> list[Event]:
    """So many events, and an end of all that came.

    Args:
        events: how many.
        seed: of all that is drawn.
        plain: whether nobody has a deadline or a priority.
        most_new: tokens that a request generates, at most.
    """
    choose, drawn = random.Random(seed), list[Event]()
    histories: list[Sequence[int]] = []
    running: list[Ask] = []

    def ask() -> Ask:
        if histories and choose.random() < 0.05:
            kind, prompt = "again", list(choose.choice(histories[-30:])[:LONGEST])
        else:
            kind, prompt = _next(choose, histories)
        timeout, priority = choose.random() if choose.random() < 0.05 else None, choose.randint(0, 2)
        if plain:
            timeout, priority = None, 0
        count, told = choose.randint(1, most_new), choose.random() < 0.5
        return Ask(tuple(prompt), count, kind, choose.random(), priority, timeout, told)

    while len(drawn) < events:
        what = choose.random()
        if what < 0.45 and len(running) < AT_ONCE:
            size = min(choose.choice([1, 1, 1, 2, 3, 6]), AT_ONCE - len(running))
            pack = [ask() for _ in range(size)]
            histories += [one.prompt for one in pack]
            running += pack
            drawn.append(Pack(tuple(pack)))
        elif what < 0.55 and running:
            late = choose.randrange(min(4, len(running)))
            drawn.append(Cancel(len(running) - 1 - late, choose.random() * PAUSE))
        elif what < 0.58:
            drawn.append(Lull())
        elif running:
            which = choose.randrange(len(running))
            ended = running.pop(which)
            histories.append([*ended.prompt, *ended.alone.tokens])
            drawn.append(End(which))
    return drawn + [End(0)] * len(running)


def described(events: Sequence[Event]) -> Counter[str]:
    """What a script asks for, counted."""
    counted = Counter[str]()
    for event in events:
        counted[type(event).__name__.lower()] += 1
        asks = event.asks if isinstance(event, Pack) else ()
        counted["packs of several"] += len(asks) > 1
        for ask in asks:
            length = len(ask.prompt)
            counted["conversations"] += ask.kind in ("new", "branch")
            counted["requests"] += 1
            counted[ask.kind] += 1
            counted["of one token"] += length == 1
            counted[f"of {LONGEST}"] += length == LONGEST
            counted["multiples"] += length % 64 == 0
            counted["beside a multiple"] += length > 2 and length % 64 in (1, 63)
    return counted


def _next(choose: random.Random, histories: Sequence[Sequence[int]]) -> tuple[str, list[int]]:
    kind, begun = "new", list[int]()
    if histories and choose.random() < 0.75:
        parent = choose.choice(histories[-30:] if choose.random() < 0.7 else histories)
        cuts = [len(parent), len(parent), choose.randint(1, len(parent)), len(parent) // 64 * 64]
        begun = list(parent[: choose.choice(cuts)])[: LONGEST - 1]
        if begun:
            kind = "turn" if len(begun) == len(parent) else "branch"
    length = choose.choice([*LENGTHS, choose.randint(1, LONGEST)])
    more = max(1, length - len(begun)) if choose.random() < 0.5 else choose.randint(1, 20)
    new = choose.choices(range(CONFIG.vocab_size), k=more)
    if choose.random() < 0.3:  # it copies, as answers about a text do: there is something to guess
        piece = (begun or new)[-choose.randint(3, 20) :]
        new = (piece * more)[:more]
    return kind, [*begun, *new][:LONGEST]
