"""Teaches a KDA layer to recall: pairs of a key and a value are read once, then each key must give its value.

    python examples/recall.py

A KDA layer remembers in one matrix a head, however long the text. What it can be asked about later shows what such a
state holds: here 16 pairs, drawn anew for every sequence, so that nothing can be learned but how to remember. The
answers are asked the way the state is meant to be used: the pairs go in, the state comes out, and the queries go on
from it.

Measured with the defaults on a CPU, seeds 0, 1 and 2, on 16,384 queries of sequences never trained on: 99.4 to
99.9 % are answered rightly, where guessing gives 1.6 %.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kda_jax import KDAState, KimiDeltaAttention

# What the random numbers are for, so that no two uses draw the same.
TRAINING, TESTING = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Sequences `key value key value ... query query ...`: `pairs` pairs of distinct keys, then each key once more.

    Tokens 0 .. keys - 1 are keys, keys .. keys + values - 1 are values. Answers count from 0.
    """

    pairs: int
    keys: int
    values: int

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise ValueError(
                f"pairs={self.pairs} needs as many distinct keys; choose 1 to {self.keys}, or more keys"
            )
        if self.values < 2:
            raise ValueError(f"values={self.values} leaves nothing to choose; give 2 or more")

    @property
    def vocab_size(self) -> int:
        """Distinct tokens."""
        return self.keys + self.values

    def draw(self, random: np.random.Generator, rows: int) -> Sequences:
        """Draws `rows` sequences. The queries come in an order of their own."""
        keys = random.permuted(np.tile(np.arange(self.keys, dtype=np.int32), (rows, 1)), axis=1)
        keys = keys[:, : self.pairs]
        values = random.integers(self.values, size=keys.shape, dtype=np.int32)
        order = random.permuted(np.tile(np.arange(self.pairs), (rows, 1)), axis=1)
        return Sequences(
            np.stack((keys, self.keys + values), axis=-1).reshape(rows, -1),
            np.take_along_axis(keys, order, axis=1),
            np.take_along_axis(values, order, axis=1),
        )


class Sequences(NamedTuple):
    """int32: `pairs` [B, 2 * pairs] to be read, `queries` [B, pairs], and their `answers` [B, pairs]."""

    pairs: np.ndarray | jax.Array
    queries: np.ndarray | jax.Array
    answers: np.ndarray | jax.Array


class Recaller(nnx.Module):
    """An embedding, KDA layers with residuals, and a head over the values."""

    def __init__(
        self, task: Task, *, width: int = 64, num_heads: int = 1, num_layers: int = 1, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.Embed(task.vocab_size, width, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(num_layers + 1)])
        self.layers = nnx.List(
            [KimiDeltaAttention(width, num_heads, width // num_heads, rngs=rngs) for _ in range(num_layers)]
        )
        self.head = nnx.Linear(width, task.values, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: np.ndarray | jax.Array, states: tuple[KDAState, ...] | None = None
    ) -> tuple[jax.Array, tuple[KDAState, ...]]:
        """Tokens [B, T], going on from `states` -> logits [B, T, values], and the states behind the tokens."""
        x, new = self.embed(jnp.asarray(tokens)), []
        for i, layer in enumerate(self.layers):
            y, state = layer(self.norms[i](x), None if states is None else states[i])
            x = x + y
            new.append(state)
        return self.head(self.norms[-1](x)), tuple(new)


class Outcome(NamedTuple):
    """A training run: the loss of each step in nats a query, and the fraction of fresh queries answered rightly."""

    losses: list[float]
    before: float
    after: float


def train(
    task: Task,
    *,
    steps: int,
    seed: int,
    layers: int = 1,
    batch: int = 32,
    rate: float = 1e-2,
    test_rows: int = 1024,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Outcome:
    """Trains a new `Recaller`.

    Args:
        task: what the sequences are.
        steps: optimizer steps, each on sequences of its own.
        seed: decides the first weights and all sequences.
        layers: KDA layers, each with a residual.
        batch: sequences a step.
        rate: the peak learning rate: linear up in the first tenth of the steps, then a cosine down to 0.
        test_rows: sequences that the accuracy is measured on, before and after.
        report: called after each step with its number from 1 and its loss.

    Raises:
        ValueError: a number is out of its range.
    """
    if min(steps, layers, batch, test_rows) < 1 or not rate > 0.0:
        raise ValueError(f"{steps=}, {layers=}, {batch=}, {test_rows=} and {rate=} must be positive")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"{seed=} must be a number from 0 to {(1 << 32) - 1}")
    graphdef, params = nnx.split(Recaller(task, num_layers=layers, rngs=nnx.Rngs(seed)))
    warmup = -(-steps // 10)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, warmup, steps + 1))
    moments = optimizer.init(params)

    def mean_loss(params: nnx.State, sequences: Sequences) -> jax.Array:
        tokens = jnp.concatenate((sequences.pairs, sequences.queries), axis=1)
        logits, _ = nnx.merge(graphdef, params)(tokens)
        asked = logits[:, sequences.pairs.shape[1] :]
        return optax.softmax_cross_entropy_with_integer_labels(asked, sequences.answers).mean()

    @jax.jit
    def step(
        params: nnx.State, moments: optax.OptState, sequences: Sequences
    ) -> tuple[Any, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(params, sequences)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    @jax.jit
    def accuracy(params: nnx.State, sequences: Sequences) -> jax.Array:
        model = nnx.merge(graphdef, params)
        _, states = model(sequences.pairs)
        logits, _ = model(sequences.queries, states)
        return (logits.argmax(axis=-1) == sequences.answers).mean()

    fresh = task.draw(np.random.default_rng([seed, TESTING]), test_rows)
    before, losses = float(accuracy(params, fresh)), []
    for number in range(1, steps + 1):
        sequences = task.draw(np.random.default_rng([seed, TRAINING, number]), batch)
        params, moments, loss = step(params, moments, sequences)
        losses.append(float(loss))
        report(number, losses[-1])
    return Outcome(losses, before, float(accuracy(params, fresh)))


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 400,
    seed: Annotated[int, typer.Option(help="decides the first weights and all sequences")] = 0,
    pairs: Annotated[int, typer.Option(help="pairs to remember in a sequence")] = 16,
    keys: Annotated[int, typer.Option(help="different keys there are")] = 64,
    values: Annotated[int, typer.Option(help="different values there are")] = 64,
    layers: Annotated[int, typer.Option(help="KDA layers")] = 1,
    batch: Annotated[int, typer.Option(help="sequences a step")] = 32,
) -> None:
    """Trains a small KDA model to recall the values of keys it has read, and says how well it does."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        task = Task(pairs=pairs, keys=keys, values=values)
        with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
            line = bar.add_task("compiling", total=steps)

            def report(step: int, loss: float) -> None:
                bar.update(line, completed=step, description=f"loss {loss:.3f}")

            outcome = train(task, steps=steps, seed=seed, layers=layers, batch=batch, report=report)
    except ValueError as error:
        print(f"recall: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    print(f"loss: {outcome.losses[0]:.3f} at first, {outcome.losses[-1]:.3f} after {steps} steps")
    print(
        f"values recalled: {outcome.before:.1%} before, {outcome.after:.1%} after; guessing gives {1 / values:.1%}"
    )


if __name__ == "__main__":
    typer.run(main)
