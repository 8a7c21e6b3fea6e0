"""Probabilities of tokens as json."""

from __future__ import annotations

import pytest

from kda_jax.engine import Token
from kda_jax.server import logprobs
from server_site import byte_tokenizer


class Counted(str):
    """A text that counts how often its length is asked for."""

    asked = 0

    def __len__(self) -> int:
        Counted.asked += 1
        return super().__len__()


def test_offsets_of_a_long_text_take_a_look_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, tokenizer = [Token(i % 5, -1.0) for i in range(100)], byte_tokenizer()
    monkeypatch.setattr(tokenizer, "decode", lambda ids: Counted("x" * ids[0]))
    told = logprobs.of_text(tokenizer, tokens, 0, 7)
    assert told["text_offset"] == [7 + sum(i % 5 for i in range(n)) for n in range(100)]
    assert Counted.asked <= 100
    assert logprobs.of_text(tokenizer, [], 0, 7)["text_offset"] == []
