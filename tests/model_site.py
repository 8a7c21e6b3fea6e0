"""One instance that serves prompts of a model through a store: a prefill in steps, each of which may be its last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cache import InMemory, KeyChain, Limits, Namespace, Placed, ResumePlan, Store, Tier, View, load, place
from cache.retention import policy
from cache.retention.protocol import Kind
from kda_jax.engine import cut, join
from kda_jax.forward import SplitModel, prefill
from kda_jax.generate.loop import Decoding, run
from kda_jax.sampling import Sampler
from kda_jax.state import ModelState

STEP = 128


class Served(NamedTuple):
    """Where a prefill resumed, the logits of all tokens that it computed, and the state behind them."""

    boundary: int
    logits: np.ndarray
    end: Any


class ModelSite:
    """Serves prompts one after another; its clock counts them.

    `published` has every payload that the store was given, with what its bytes were then.
    """

    def __init__(
        self, parts: SplitModel, *, grid: int = 64, page: int = 128, capacity: int, budget: int, int8: bool = False
    ) -> None:  # fmt: skip
        self.parts, self.page, self.capacity, self.int8, self.now = parts, page, capacity, int8, 0.0
        self.limits, self.policy = Limits(grid=grid), policy("ours")
        dtype = "int8" if int8 else "float32"
        self.namespace = Namespace(weights=b"weights", tokenizer=b"bytes", state_dtype=dtype).digest()
        self.store = Store.empty(
            {Tier.DEVICE: budget}, self.policy, state_nbytes=1024, row_nbytes=64, page=page
        )
        self.published: list[tuple[Any, dict[str, bytes]]] = []

    def serve(self, tokens: np.ndarray, *, marks: Sequence[int] = (), steps: int | None = None) -> Served:
        """Prefills a prompt from where the store has it, putting what was planned; gives up after `steps` steps."""
        self.now += 1
        seen, plan = self.look(tokens)
        self.store = self.store.used(seen, plan.key, self.now)
        if plan.key is not None:
            self.store = self.store.pin(plan.key)
        state = self.resume(tokens, plan)
        placed = place(plan, len(tokens), self.limits, self.policy.creation, marks)
        logits, at = [], plan.boundary
        while at < len(tokens) and (steps is None or len(logits) < steps):
            stop = min(at + STEP, len(tokens))
            inside = [each for each in placed if at < each.boundary <= stop]
            rows, state, made = self.read(tokens[at:stop], state, [each.boundary for each in inside])
            logits.append(rows)
            self.publish(tokens, inside, made, plan.boundary)
            at = stop
        if plan.key is not None:
            self.store = self.store.unpin(plan.key)
        return Served(plan.boundary, np.concatenate(logits), state)

    def look(self, tokens: np.ndarray) -> tuple[View, ResumePlan]:
        """What is held of a prompt, and where it would resume."""
        seen = self.store.match(self.namespace, tokens)
        return seen, self.store.plan(seen, len(tokens), self.limits)

    def resume(self, tokens: np.ndarray, plan: ResumePlan) -> ModelState | None:
        """The state that a plan starts from, None for a cold start."""
        if not plan.boundary:
            return None
        chain = KeyChain.start(self.namespace, self.page).extend(tokens[: plan.boundary])
        return join(*load(self.store, plan, chain, {Tier.DEVICE: InMemory()}))

    def read(
        self, tokens: np.ndarray, state: ModelState | None, boundaries: Sequence[int]
    ) -> tuple[np.ndarray, ModelState, list[ModelState]]:
        """One step: always the same shapes, so that few programs are compiled."""
        padded = np.zeros((1, STEP), np.int32)
        padded[0, : len(tokens)] = tokens
        logits, end, *at = prefill(
            self.parts, padded, state, [len(tokens)], list(boundaries) or None, capacity=self.capacity
        )
        return np.asarray(logits)[0, : len(tokens)], end, at[0] if at else []

    def publish(
        self, tokens: np.ndarray, placed: Sequence[Placed], made: Sequence[ModelState], after: int
    ) -> None:
        """Puts the checkpoints of one step; the pages before `after` are pinned."""
        for (boundary, kind), state in zip(placed, made, strict=True):
            self.put(tokens[:boundary], state, kind, after)

    def put(self, tokens: np.ndarray, state: ModelState, kind: Kind, after: int = 0) -> None:
        """Publishes the state behind tokens."""
        leaves, pages = cut(state, self.page, after=after, int8=self.int8)
        self.published += [(payload, contents(payload)) for payload in (leaves, *pages)]
        self.store = self.store.put(self.namespace, tokens, leaves, pages, kind=kind, now=self.now)

    def changed(self) -> int:
        """How many published payloads have other bytes than when they were published, or none any more."""
        gone = sum(any(leaf.is_deleted() for leaf in payload.values()) for payload, _ in self.published)
        return gone or sum(contents(payload) != was for payload, was in self.published)


def contents(payload: dict[str, jax.Array]) -> dict[str, bytes]:
    """The bytes of a payload's leaves."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in payload.items()}


def decode_on(parts: SplitModel, token: int, state: ModelState, count: int) -> tuple[list[int], ModelState]:
    """Decodes greedily in place: `state` is given up, as a server does it.

    Returns:
        the tokens absorbed, `token` first, and the state behind them.
    """
    graphdef, params = parts
    now = Decoding(np.asarray([token], np.int32), state, None)  # pyright: ignore[reportArgumentType]
    stops = np.full((1,), -1, np.int32)
    after, _, tokens = run(graphdef, params, now, np.int32(count), stops, jax.random.key(0), Sampler())
    return np.asarray(tokens)[0, :count].tolist(), after.state
