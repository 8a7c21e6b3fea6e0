"""A thread that owns things: its turns come, whatever others hand it."""

from __future__ import annotations

from kda_jax.engine.owner import Owner


def test_a_turn_comes_however_many_calls_come_meanwhile() -> None:
    calls, turns = [0], []

    def again() -> None:
        calls[0] += 1
        if calls[0] < 1000:
            owner.post(again)

    owner = Owner(lambda: turns.append(calls[0]), lambda error: None)
    owner.post(again)
    owner.post(again)
    owner.start()
    owner.ask(lambda: None)
    owner.stop()
    assert turns[0] <= 2
