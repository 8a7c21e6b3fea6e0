"""Drafts of the engine's simulation: right, wrong, right up to a place, and those of prompt lookup."""

from __future__ import annotations

import random

from engine_device import VOCAB, cold

from cache.tokens import Tokens
from kda_jax.engine.lookup import Lookup
from kda_jax.engine.request import Request


class Guesses:
    """A drafter that knows how the request goes on, and says it or not."""

    def __init__(self, request: Request, chance: random.Random) -> None:
        self.request, self.chance, self.lookup = request, chance, Lookup()

    @property
    def count(self) -> int:
        return self.lookup.count

    def read(self, tokens: Tokens, most: int) -> None:
        self.lookup.read(tokens, most)

    def propose(self, tokens: Tokens, most: int) -> tuple[int, ...]:
        looked_up = self.lookup.propose(tokens, most)
        if self.chance.random() < 0.3:
            return looked_up
        prompt = tuple(self.request.tokens.tolist())
        answer = cold(self.request.namespace, prompt, self.request.max_new_tokens)
        drafts = [*answer[len(tokens) - len(prompt) :], *(self.chance.randrange(VOCAB) for _ in range(most))]
        if self.chance.random() < 0.5:
            drafts[self.chance.randrange(most)] = self.chance.randrange(VOCAB)
        return tuple(drafts[: self.chance.randint(0, most)])
