"""One continuation: the engine's tokens as text, cut at stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from kda_jax.engine import Finished, Stream, Token
from kda_jax.generate.text import TextStream
from kda_jax.tokenizer import Tokenizer

_AHEAD = 64  # pieces that may wait for a reader who is slower than the engine


class Piece(NamedTuple):
    """What is new of a continuation.

    Attributes:
        text: never half a character, never any part of a stop string; often empty.
        tokens: that no stop string can take back any more.
        token: whether a token brought it, and not the end.
    """

    text: str
    tokens: tuple[Token, ...]
    token: bool = True


class Choice:
    """One continuation on its way.

    Attributes:
        stream: of the engine.
        finished: how the engine's request ended, once it has.
        generated: tokens that came, up to one that completes a stop string.
    """

    def __init__(self, stream: Stream, tokenizer: Tokenizer, stop: Sequence[str], logprobs: bool) -> None:
        """`logprobs`: whether pieces have tokens, not text alone."""
        self.stream, self._logprobs = stream, logprobs
        self.finished: Finished | None = None
        self.generated = 0
        self._text = TextStream(partial(tokenizer.decode, skip_special=True), stop)
        self._tokens: list[Token] = []
        self._told = 0

    @property
    def finish_reason(self) -> str:
        """`stop` at a stop string or a stop token, else the engine's word."""
        assert self.finished is not None
        return "stop" if self._text.stopped else self.finished.reason

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What comes, as it comes; who stops listening ends the request."""
        try:
            async with aclosing(self.stream.__aiter__()) as tokens:  # pyright: ignore[reportArgumentType]
                async for token in tokens:
                    if self._text.stopped:
                        continue  # on their way when the stop string was met
                    yield self._push(token)
                    if self._text.stopped:
                        self.stream.cancel()
            rest = self._text.finish()
            self.finished = self.stream.result(timeout=0.0)
            yield Piece(rest, self._settled(self._kept), token=False)
        finally:
            self.stream.cancel()

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, up to the one that completed a stop string; a stop token among them."""
        assert self.finished is not None
        return self.generated if self._text.stopped else self.finished.usage.completion_tokens

    @property
    def _kept(self) -> int:
        return self._text.num_kept if self._text.stopped else len(self._tokens)

    def _push(self, token: Token) -> Piece:
        self.generated += 1
        self._tokens.append(token)
        text = self._text.push(token.token)
        stopped = self._text.stopped
        return Piece(
            text, self._settled(self._kept if stopped or not self._logprobs else self._text.num_safe)
        )

    def _settled(self, count: int) -> tuple[Token, ...]:
        if not self._logprobs:
            return ()
        new = tuple(self._tokens[self._told : count])
        self._told = max(self._told, count)
        return new


async def interleaved(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece | None], None]:
    """The pieces of all continuations, each with its choice's number, as they come; None for one that has ended.

    Who stops listening ends all of them.
    """
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(_AHEAD)
    tasks = [asyncio.create_task(_feed(queue, number, choice)) for number, choice in enumerate(choices)]
    try:
        left = len(choices)
        while left:
            number, piece = await queue.get()
            if isinstance(piece, BaseException):
                raise piece
            left -= piece is None
            yield number, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]], number: int, choice: Choice
) -> None:
    try:
        async with aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                await queue.put((number, piece))
    except Exception as error:
        await queue.put((number, error))
    else:
        await queue.put((number, None))
