"""500 conversations at once, with each tier behind the device and with guesses or none: the tokens of each are those
that it makes alone, and where the arithmetic is the same, so are the bits.

`python tests/engine_storm.py --store host disk mooncake --lookup 0 3 --no-faults --pages 80 --events 2100` has 500 for
each.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
from engine_script import Event, described, script
from engine_site import programs, uncompiled
from engine_storm import live, tiers

from cache.retention import Creation, Kind
from kda_jax.engine import Programs
from transfer import Unavailable
from transfer.mooncake import MooncakeSettings
from transfer.mooncake.library import load

STORES = {"host": "host", "disk": "disk", "mooncake": "remote"}
"""What is behind the device, and how an engine calls that tier."""
CONVERSATIONS, EVENTS = 84, 340
"""Of each of six runs."""
PAGES, FEW = 80, 36
"""Of a device: four requests that run take up to 20, and checkpoints the others."""
GRID = Creation(kinds=frozenset({Kind.PROMPT_END, Kind.BRANCH, Kind.MISSING}))
"""Checkpoints on the grid alone, none of which was decoded."""


@lru_cache
def conversations(store: str) -> list[Event]:
    """The same with guesses and without, and no others for another store."""
    return script(EVENTS, list(STORES).index(store))


@lru_cache
def padded() -> Programs:
    """Programs of one size of chunks, few to compile; each is compiled when it is first called."""
    made = copy.copy(uncompiled())
    made.chunks = made.chunks[-1:]
    return made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no store that fails."""
    monkeypatch.setattr("kda_jax.engine.slower.MOST", 20.0)
    monkeypatch.setattr("kda_jax.engine.slower.LOAD_LEAST", 20.0)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake":
        try:
            load(MooncakeSettings())
        except Unavailable as error:
            pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize("lookup", [0, 3], ids=["plain", "guesses"])
def test_conversations_at_once_make_the_tokens_they_make_alone(store: str, lookup: int) -> None:
    """They branch, are edited and cancelled at any instant, resume from the device and from behind it; with Mooncake in
    one of two engines, from what either has written."""
    events, compiled = conversations(store), len(programs()._compiled)
    asked = described(events)
    assert asked["conversations"] >= CONVERSATIONS and asked["turn"] > 30 and asked["branch"] > 20, asked
    assert asked["of one token"] and asked["of 300"] and asked["packs of several"] > 20, asked
    assert asked["multiples"] > 5 and asked["beside a multiple"] > 20, asked
    with tiers(store) as behind:
        lived = live(events, behind, 0, lookup=lookup, pages=PAGES)
    happened, tier = lived.happened, STORES[store]
    assert len(programs()._compiled) == compiled, "nothing is compiled for them"
    assert sum(happened[each] for each in ("finished", "cancelled", "expired")) == asked["requests"], happened
    assert happened["at once"] >= 8 and happened["finished"] > 80, happened
    assert happened["cancelled"] > 5 and happened["cancelled amid its tokens"], happened
    assert happened["tokens"] > 500 and happened["logits"] > 300 and happened["within rounding"] <= 1, (
        happened
    )
    assert happened["from device"] > 30 and happened["restored"] > 4000, happened
    assert happened[f"from {tier}"] > 7 and happened[f"tokens from {tier}"] > 200, happened
    assert happened["branches resumed"] > 10 and happened["resumed amid a page"] > 5, happened
    assert len(behind) == 1 or happened["from another engine"] > 2, happened
    if lookup:
        assert happened["drafts"] > happened["drafts that were right"] > 1, happened
    else:
        assert not happened["drafts"], happened


@pytest.mark.optimised
def test_a_resumed_prompt_on_the_grid_has_the_bits_of_a_cold_one(store: str) -> None:
    """What comes from any tier is what would have been computed (float32): all logits are the same, to the bit."""
    options: dict[str, Any] = {"programs": padded(), "creation": GRID, "pages": FEW}
    with tiers(store) as behind:
        lived = live(script(240, 7, plain=True, most_new=1), behind, 0, exact=True, **options)
    happened = lived.happened
    assert lived.furthest == 0.0
    assert happened["to the bit, resumed"] > 8 and happened["to the bit"] > 30, happened
    assert happened[f"from {STORES[store]}"] > 4 and happened["resumed amid a page"] == 0, happened
