"""Probabilities of tokens, in the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from kda_jax.engine import Token
from kda_jax.tokenizer import Tokenizer

LEAST = -9999.0
"""What stands for minus infinity, which json does not have."""


def of_text(tokenizer: Tokenizer, tokens: Sequence[Token], top: int, start: int) -> dict[str, Any]:
    """Of a completion: lists side by side.

    Args:
        tokenizer: to spell the tokens.
        tokens: with their probabilities.
        top: likeliest tokens to tell beside each.
        start: characters of the completion before the first of them.
    """
    spelled = [tokenizer.decode([token.token]) for token in tokens]
    offsets = list(accumulate(map(len, spelled[:-1]), initial=start)) if spelled else []
    return {
        "tokens": spelled,
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "top_logprobs": [
            {tokenizer.decode([other]): _number(value) for other, value in token.top[:top]}
            for token in tokens
        ]
        if top
        else None,
        "text_offset": offsets,
    }


def of_chat(tokenizer: Tokenizer, tokens: Sequence[Token], top: int) -> dict[str, Any]:
    """Of a chat: one object a token, with its bytes."""
    return {
        "content": [
            {
                **_entry(tokenizer, token.token, token.logprob),
                "top_logprobs": [_entry(tokenizer, other, value) for other, value in token.top[:top]],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    raw = tokenizer.decode_bytes([token])
    return {"token": raw.decode(errors="replace"), "logprob": _number(logprob), "bytes": list(raw)}


def _number(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)
