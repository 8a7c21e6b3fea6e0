"""Rates over the last minutes."""

from __future__ import annotations

import pytest

from kda_jax.server.history import SPAN_S, SPANS, History
from kda_jax.server.keys import EVERYBODY


def test_what_is_old_is_forgotten_though_little_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("kda_jax.server.history.time.time", lambda: now[0])
    history = History()
    history.add(EVERYBODY, 10, {"device": 8}, 1)
    now[0] += SPAN_S * (SPANS - 1)
    history.add(EVERYBODY, 5, {}, 1)
    assert [row["time"] for row in history.rows(EVERYBODY)] == [1000, 1000 + SPAN_S * (SPANS - 1)]
    now[0] += SPAN_S
    assert [row["tokens"] for row in history.rows(EVERYBODY)] == [{"computed": 5, "generated": 1}]
    now[0] += 3600.0
    assert not history.rows(EVERYBODY)
