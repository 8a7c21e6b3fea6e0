"""Instances that join a model and a store wrongly, one way each, so that only the model's numbers can tell."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cache.retention.protocol import Kind
from kda_jax.state import KDAState, MLAState, ModelState
from model_site import ModelSite


def with_position(state: ModelState, tokens: int) -> ModelState:
    """A state that says it is behind other tokens than it is."""
    return ModelState(
        tuple(each._replace(position=jnp.full_like(each.position, tokens)) for each in state.layers)
    )


class Swapped(ModelSite):
    """The checkpoints of a step lie under each other's boundaries."""

    def publish(self, tokens: np.ndarray, placed: Any, made: Any, after: int) -> None:
        swapped = [with_position(state, each.boundary) for each, state in zip(placed, made[::-1])]
        super().publish(tokens, placed, swapped, after)


class StateOfTheEnd(ModelSite):
    """Checkpoints have the recurrent state that the step ended in."""

    field = "recurrent"

    def read(self, tokens: np.ndarray, state: ModelState | None, boundaries: Sequence[int]) -> Any:
        logits, end, made = super().read(tokens, state, boundaries)

        def of_the_end(mine: KDAState | MLAState, last: KDAState | MLAState) -> KDAState | MLAState:
            if isinstance(mine, MLAState):
                return mine
            return mine._replace(**{self.field: getattr(last, self.field)})

        return (
            logits,
            end,
            [ModelState(tuple(map(of_the_end, each.layers, end.layers))) for each in made],
        )


class StaleWindow(StateOfTheEnd):
    """Checkpoints have the convolution window that the step ended in."""

    field = "conv"


class Ahead(ModelSite):
    """The whole prompt's checkpoint is published when the first of it is computed."""

    def publish(self, tokens: np.ndarray, placed: Any, made: Any, after: int) -> None:
        super().publish(tokens, placed, made, after)
        end = self.limits.floor(len(tokens))
        if made and end > placed[-1].boundary:
            self.put(tokens[:end], with_position(made[-1], end), Kind.PROMPT_END, after)


class Changing(ModelSite):
    """What is resumed is not what was loaded."""

    def resume(self, tokens: np.ndarray, plan: Any) -> ModelState | None:
        state = super().resume(tokens, plan)
        return None if state is None else ModelState(tuple(self.change(each) for each in state.layers))

    def change(self, layer: KDAState | MLAState) -> KDAState | MLAState:
        return layer


class RowsOffByOne(Changing):
    """Latents lie one row later."""

    def change(self, layer: KDAState | MLAState) -> KDAState | MLAState:
        if isinstance(layer, KDAState):
            return layer
        return layer._replace(latent=jnp.roll(layer.latent, 1, axis=1))


class NoTail(Changing):
    """Latents behind the last whole page are lost."""

    def change(self, layer: KDAState | MLAState) -> KDAState | MLAState:
        if isinstance(layer, KDAState):
            return layer
        whole = layer.latent.shape[1] // self.page * self.page
        return layer._replace(latent=layer.latent.at[:, whole:].set(0.0))


class OtherBranch(ModelSite):
    """The first state that was loaded at a length serves every prompt that resumes there."""

    def resume(self, tokens: np.ndarray, plan: Any) -> ModelState | None:
        self.first: dict[int, ModelState | None] = getattr(self, "first", {})
        return self.first.setdefault(plan.boundary, super().resume(tokens, plan))


class Early(ModelSite):
    """A resumed prefill reads from one token before its boundary."""

    def read(self, tokens: np.ndarray, state: ModelState | None, boundaries: Sequence[int]) -> Any:
        return super().read(tokens if state is None else np.roll(tokens, 1), state, boundaries)


MUTANTS: dict[str, Callable[..., ModelSite]] = {
    "checkpoints are swapped": Swapped,
    "the state of the end": StateOfTheEnd,
    "a stale window": StaleWindow,
    "published before it is computed": Ahead,
    "rows are off by one": RowsOffByOne,
    "rows of the last page are lost": NoTail,
    "the state of another branch": OtherBranch,
    "a token too early": Early,
    "int8 without saying so": functools.partial(ModelSite, int8=True),
}
