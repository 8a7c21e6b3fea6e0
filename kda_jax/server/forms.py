"""The json of answers: of completions and of chats, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from kda_jax.engine import Token
from kda_jax.server import logprobs
from kda_jax.tokenizer import Tokenizer


@runtime_checkable
class Form(Protocol):
    """What differs between the two kinds of answers. `logprobs` below are those of one choice, or None."""

    prefix: str
    whole: str
    chunk: str

    def logprobs(self, tokens: Sequence[Token], start: int) -> dict[str, Any]:
        """Of tokens, the first of which stands behind `start` characters."""
        ...

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        """One continuation, whole."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream begins a continuation with."""
        ...

    def delta(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        """What is new of a continuation."""
        ...


class TextForm:
    """Of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        """`top`: likeliest tokens to tell beside each."""
        self._tokenizer, self._top = tokenizer, top

    def logprobs(self, tokens: Sequence[Token], start: int) -> dict[str, Any]:
        return logprobs.of_text(self._tokenizer, tokens, self._top, start)

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    delta = choice


class ChatForm:
    """Of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        """`top`: likeliest tokens to tell beside each."""
        self._tokenizer, self._top = tokenizer, top

    def logprobs(self, tokens: Sequence[Token], start: int) -> dict[str, Any]:
        return logprobs.of_chat(self._tokenizer, tokens, self._top)

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
